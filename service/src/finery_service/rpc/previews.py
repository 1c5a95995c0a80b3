"""ReportPreview: some rows are rendered, and shown; that is all that was wanted."""

from __future__ import annotations

from pydantic import TypeAdapter

from finery.types import data
from finery.types.previews import PreviewRow
from finery.types.reasons import JobReason
from finery_protos.v1 import worker_pb2 as pb
from finery_service.rpc import checks, fence
from finery_service.rpc.fence import Call
from finery_service.rpc.finish import end
from finery_service.rpc.resources import resources

_ROWS = TypeAdapter(tuple[PreviewRow, ...])
_WARNINGS = TypeAdapter(tuple[data.Warning, ...])


async def report_preview(call: Call, request: pb.ReportPreviewRequest) -> pb.Orders:
    """Ends the attempt, and the preview; Finish may follow and changes nothing."""
    rows = resources("rows_json", request.rows_json, _ROWS)
    warnings = resources("warnings_json", request.warnings_json or "[]", _WARNINGS)
    job, attempt = await fence.find(call, request.attempt_id, request.fence)
    if attempt.state == "ended" and attempt.kind == "prepare" and attempt.reason == JobReason.COMPLETED:
        return fence.orders(call, job.intent, 0)
    fence.must_run(job, attempt, "prepare")
    if job.preview is None:
        checks.not_now(f"expected ReportPrepared, as {job.id} is no preview")
    job.preview = {**job.preview, "rows": rows, "warnings": warnings}
    await end(call, job, attempt, JobReason.COMPLETED, None)
    return fence.orders(call, job.intent, 0)
