"""ReportPrepared: the data is rendered, counted and stored; the job is queued."""

from __future__ import annotations

from typing import Any

from pydantic import ValidationError

from finery.types.data import DataReport
from finery.types.jobs import EventType
from finery.types.reasons import JobReason
from finery_protos.v1 import worker_pb2 as pb
from finery_service.jobs import store
from finery_service.jobs.tables import JobRow
from finery_service.rpc import checks, fence
from finery_service.rpc.begin import output_prefix
from finery_service.rpc.fence import Call
from finery_service.rpc.finish import end

_POSITIVE = ("rows", "tokens", "total_steps", "total_trained_tokens")
_NOT_NEGATIVE = ("trained_tokens", "dropped_rows", "truncated_rows")
_COUNTS = _POSITIVE + _NOT_NEGATIVE


async def report_prepared(call: Call, request: pb.ReportPreparedRequest) -> pb.Orders:
    """Ends the attempt and queues the job; Finish may follow and changes nothing."""
    report = _check(request)
    job, attempt = await fence.find(call, request.attempt_id, request.fence)
    if attempt.state == "ended" and attempt.kind == "prepare" and attempt.reason == JobReason.COMPLETED:
        return fence.orders(call, job.intent, 0)
    fence.must_run(job, attempt, "prepare")
    if job.kind != "job":
        report_of = {"preview": "ReportPreview", "run": "ReportEnvironmentRun"}[job.kind]
        checks.not_now(f"expected {report_of}, as {job.id} is a {job.kind}")
    checks.key_below(request.prepared_prefix, output_prefix(attempt), "prepared_prefix")
    if job.method != "rl" and not request.trained_tokens:
        checks.invalid("trained_tokens: expected at least 1, found 0: finish with a reason instead")
    _check_sets(report, job, request.rows)
    job.prepared_prefix = request.prepared_prefix
    job.total_steps = request.total_steps
    job.quote_tokens = request.total_trained_tokens
    job.data = report.model_dump(mode="json")
    events = _events(request, report, job.data)
    await store.append_events(call.session, tenant=job.tenant_id, job=job.id, events=events, now=call.now)
    await end(call, job, attempt, JobReason.COMPLETED, None)
    return fence.orders(call, job.intent, 0)


def _events(
    request: pb.ReportPreparedRequest, report: DataReport, data: dict[str, Any]
) -> list[tuple[EventType, dict[str, Any]]]:
    counts = {name: getattr(request, name) for name in _COUNTS}
    warnings = [warning.model_dump(mode="json", exclude_none=True) for warning in report.warnings]
    return [("prepared", {**counts, "statistics": data}), *(("warning", warning) for warning in warnings)]


def _check(request: pb.ReportPreparedRequest) -> DataReport:
    for name in _POSITIVE:
        if getattr(request, name) <= 0:
            checks.invalid(f"{name}: expected at least 1, found {getattr(request, name)}: finish with a reason instead")
    for name in _NOT_NEGATIVE:
        if getattr(request, name) < 0:
            checks.invalid(f"{name}: expected >= 0, found {getattr(request, name)}")
    if request.trained_tokens > request.tokens:
        checks.invalid(f"trained_tokens: expected at most tokens ({request.tokens}), found {request.trained_tokens}")
    if request.truncated_rows > request.rows:
        checks.invalid(f"truncated_rows: expected at most rows ({request.rows}), found {request.truncated_rows}")
    report = checks.json_object(request.statistics_json, "statistics_json")
    try:
        return DataReport.model_validate(report)
    except ValidationError as problem:
        place = ".".join(map(str, problem.errors()[0]["loc"]))
        checks.invalid(f"statistics_json: expected a DataReport, found a wrong {place}: {problem.errors()[0]['msg']}")


def _holds_out(job: JobRow) -> bool:
    """A file that an environment holds out is read only when prompts are to be evaluated on."""
    return bool(job.spec["hyperparameters"]["eval_prompts"]) if job.method == "rl" else bool(job.validation_file_id)


def _check_sets(report: DataReport, job: JobRow, rows: int) -> None:
    expected = {"train", "validation"} if _holds_out(job) else {"train"}
    if set(report.sets) != expected:
        wanted, found = ", ".join(sorted(expected)), ", ".join(sorted(report.sets))
        checks.invalid(f"statistics_json.sets: expected {wanted}, found {found or 'none'}")
    if report.sets["train"].rows != rows:
        checks.invalid(
            f"statistics_json.sets.train.rows: expected {rows} as in rows, found {report.sets['train'].rows}"
        )
