"""ReportEnvironmentRun: prompts are shown, answers are graded; that is all that was wanted."""

from __future__ import annotations

from pydantic import TypeAdapter

from finery.types.environments import EnvironmentRunCreate, GradedAnswer, ShownPrompt
from finery.types.reasons import JobReason
from finery_protos.v1 import worker_pb2 as pb
from finery_service.rpc import checks, fence
from finery_service.rpc.fence import Call
from finery_service.rpc.finish import end
from finery_service.rpc.resources import resources

_PROMPTS = TypeAdapter(tuple[ShownPrompt, ...])
_ANSWERS = TypeAdapter(tuple[GradedAnswer, ...])


async def report_environment_run(call: Call, request: pb.ReportEnvironmentRunRequest) -> pb.Orders:
    """Ends the attempt, and the run; Finish may follow and changes nothing."""
    prompts = resources("prompts_json", request.prompts_json or "[]", _PROMPTS)
    answers = resources("answers_json", request.answers_json or "[]", _ANSWERS)
    if request.prompt_count < 1:
        checks.invalid(f"prompt_count: expected at least 1, found {request.prompt_count}")
    job, attempt = await fence.find(call, request.attempt_id, request.fence)
    if attempt.state == "ended" and attempt.kind == "prepare" and attempt.reason == JobReason.COMPLETED:
        return fence.orders(call, job.intent, 0)
    fence.must_run(job, attempt, "prepare")
    if job.run is None:
        checks.not_now(f"expected another report, as {job.id} is no run of an environment")
    asked = EnvironmentRunCreate.model_validate(job.run["request"])
    if len(answers) != len(asked.answers):
        checks.invalid(f"answers_json: expected {len(asked.answers)}, one for each answer, found {len(answers)}")
    if len(prompts) > asked.prompts:
        checks.invalid(f"prompts_json: expected at most {asked.prompts}, found {len(prompts)}")
    job.run = {**job.run, "prompt_count": request.prompt_count, "prompts": prompts, "answers": answers}
    await end(call, job, attempt, JobReason.COMPLETED, None)
    return fence.orders(call, job.intent, 0)
