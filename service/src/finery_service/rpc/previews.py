"""ReportPreview: some rows are rendered, and shown; that is all that was wanted."""

from __future__ import annotations

from pydantic import TypeAdapter, ValidationError

from finery.types.previews import PreviewRow
from finery.types.reasons import JobReason
from finery_protos.v1 import worker_pb2 as pb
from finery_service.rpc import checks, fence
from finery_service.rpc.fence import Call
from finery_service.rpc.finish import end

_ROWS = TypeAdapter(tuple[PreviewRow, ...])


async def report_preview(call: Call, request: pb.ReportPreviewRequest) -> pb.Orders:
    """Ends the attempt, and the preview; Finish may follow and changes nothing."""
    rows = _check(request)
    job, attempt = await fence.find(call, request.attempt_id, request.fence)
    if attempt.state == "ended" and attempt.kind == "prepare" and attempt.reason == JobReason.COMPLETED:
        return fence.orders(call, job.intent, 0)
    fence.must_run(job, attempt, "prepare")
    if job.preview is None:
        checks.not_now(f"expected ReportPrepared, as {job.id} is no preview")
    job.preview = {**job.preview, "rows": [row.model_dump(mode="json") for row in rows]}
    await end(call, job, attempt, JobReason.COMPLETED, None)
    return fence.orders(call, job.intent, 0)


def _check(request: pb.ReportPreviewRequest) -> tuple[PreviewRow, ...]:
    rows = checks.json_array(request.rows_json, "rows_json")
    try:
        return _ROWS.validate_python(rows)
    except ValidationError as problem:
        place = ".".join(map(str, problem.errors()[0]["loc"]))
        checks.invalid(f"rows_json: expected a list of PreviewRow, found a wrong {place}: {problem.errors()[0]['msg']}")
