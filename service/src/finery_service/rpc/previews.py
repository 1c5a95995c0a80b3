"""ReportPreview: some rows are rendered, and shown; that is all that was wanted."""

from __future__ import annotations

from typing import TypeVar

from pydantic import TypeAdapter, ValidationError

from finery.types import data
from finery.types.previews import PreviewRow
from finery.types.reasons import JobReason
from finery_protos.v1 import worker_pb2 as pb
from finery_service.rpc import checks, fence
from finery_service.rpc.fence import Call
from finery_service.rpc.finish import end

T = TypeVar("T")

_ROWS = TypeAdapter(tuple[PreviewRow, ...])
_WARNINGS = TypeAdapter(tuple[data.Warning, ...])


async def report_preview(call: Call, request: pb.ReportPreviewRequest) -> pb.Orders:
    """Ends the attempt, and the preview; Finish may follow and changes nothing."""
    rows = _check("rows_json", request.rows_json, _ROWS)
    warnings = _check("warnings_json", request.warnings_json or "[]", _WARNINGS)
    job, attempt = await fence.find(call, request.attempt_id, request.fence)
    if attempt.state == "ended" and attempt.kind == "prepare" and attempt.reason == JobReason.COMPLETED:
        return fence.orders(call, job.intent, 0)
    fence.must_run(job, attempt, "prepare")
    if job.preview is None:
        checks.not_now(f"expected ReportPrepared, as {job.id} is no preview")
    job.preview = {
        **job.preview,
        "rows": [row.model_dump(mode="json") for row in rows],
        "warnings": [warning.model_dump(mode="json") for warning in warnings],
    }
    await end(call, job, attempt, JobReason.COMPLETED, None)
    return fence.orders(call, job.intent, 0)


def _check(name: str, given: str, kind: TypeAdapter[tuple[T, ...]]) -> tuple[T, ...]:
    values = checks.json_array(given, name)
    try:
        return kind.validate_python(values)
    except ValidationError as problem:
        first = problem.errors()[0]
        place = ".".join(map(str, first["loc"]))
        checks.invalid(f"{name}: expected a list as of finery.types, found a wrong {place}: {first['msg']}")
