"""Previews: a look at a file as a model would be trained on it.

A preview is a row of `jobs` of kind `preview`. It goes the way of a job as far as the preparation, because templates
run in a worker's killable child and never in this process, and there it ends: nothing is trained, metered or listed.
"""

from __future__ import annotations

from datetime import datetime

from sqlmodel.ext.asyncio.session import AsyncSession

from finery.types import data
from finery.types.errors import ErrorDetail
from finery.types.ids import new_id
from finery.types.jobs import JobState
from finery.types.methods import FullWeights, SftHyperparameters, SftJobCreate
from finery.types.previews import Preview, PreviewCreate, PreviewRow
from finery_service.auth.caller import Member
from finery_service.clock import milliseconds
from finery_service.errors import ServiceError, not_found, refusal
from finery_service.files import store as files
from finery_service.files.tables import FileRow
from finery_service.http.paging import is_id
from finery_service.jobs import specs
from finery_service.jobs import store as jobs
from finery_service.jobs.tables import JobRow
from finery_service.models import service as models
from finery_service.models.tables import ModelRow
from finery_service.previews import store
from finery_service.usage import prices

_TOLD = 20
MAX_PENDING = 20
"""Of one tenant; about, if many ask in the same moment. All tenants' previews share a few places."""
_STATUS = {JobState.SUCCEEDED: "ready", JobState.FAILED: "failed", JobState.CANCELLED: "failed"}


async def create(session: AsyncSession, member: Member, file_id: str, body: PreviewCreate, now: datetime) -> Preview:
    """Raises 404 for the file; 400 for a file with errors, for the model, for rows longer than it takes, and for a
    `train_on` that the file's rows do not have; 429 for one too many at a time."""
    file = await _file(session, member.tenant_id, file_id, lock="keep")
    if file.status != "valid":
        found = f"{file.error_count} in {file.id}"
        message = f"Expected a file without errors, found {found}; see details, mend and upload it again."
        raise ServiceError(400, "invalid_file", message, details=file.errors[:_TOLD])
    model = await models.find(session, body.model)
    if model is None:
        expected = "the name or id of a model in the catalogue"
        raise refusal("model_not_found", "model", expected, body.model)
    specs.check_train_on(body.train_on, file.format, "train_on")
    body = body.model_copy(update={"max_length": specs.fitting_length(body, model, "max_length")})
    if await store.pending(session, member.tenant_id) >= MAX_PENDING:
        message = f"Expected at most {MAX_PENDING} previews that are not ready yet, found them; wait for one of them."
        raise ServiceError(429, "too_many_previews", message, headers={"retry-after": "5"})
    row = await _to_row(session, member, file, model, body, now)
    await jobs.insert(session, row, now)
    return _to_preview(row, model.name)


async def get(session: AsyncSession, tenant_id: str, file_id: str, preview_id: str) -> Preview:
    """Raises 404 for an unknown file or preview, for another tenant's, and for one that is too old."""
    await _file(session, tenant_id, file_id)
    found = await store.get(session, tenant_id, file_id, preview_id) if is_id(preview_id) else None
    if found is None:
        raise not_found("preview", preview_id)
    row, model = found
    return _to_preview(row, model.name)


async def _file(session: AsyncSession, tenant_id: str, file_id: str, *, lock: files.Lock | None = None) -> FileRow:
    file = await files.get(session, tenant_id, file_id, lock=lock) if is_id(file_id) else None
    if file is None:
        raise not_found("file", file_id)
    return file


async def _to_row(
    session: AsyncSession, member: Member, file: FileRow, model: ModelRow, body: PreviewCreate, now: datetime
) -> JobRow:
    spec = SftJobCreate(
        method="sft",
        model=body.model,
        training_file=file.id,
        adapter=FullWeights(type="full"),  # any tokens may be added to it
        added_tokens=body.added_tokens,
        hyperparameters=SftHyperparameters(
            train_on=body.train_on, max_length=body.max_length, truncation=body.truncation
        ),
    )
    return JobRow(
        tenant_id=member.tenant_id,
        id=new_id("prev", milliseconds(now)),
        project_id=member.project_id,
        kind="preview",
        method=spec.method,
        model_id=model.id,
        training_file_id=file.id,
        price_book_id=(await prices.in_force(session, now)).id,
        spec=spec.model_dump(mode="json"),
        preview={"request": body.model_dump(mode="json")},
        priority="normal",
        accelerators=1,
        state=JobState.VALIDATING.value,
        created_at=now,
    )


def _to_preview(row: JobRow, model: str) -> Preview:
    shown = row.preview or {}
    return Preview(
        id=row.id,
        file=row.training_file_id or "",
        model=model,
        status=_STATUS.get(JobState(row.state), "pending"),
        rows=tuple(PreviewRow.model_validate(found) for found in shown.get("rows", ())),
        warnings=tuple(data.Warning.model_validate(found) for found in shown.get("warnings", ())),
        error=ErrorDetail.model_validate(row.error) if row.error else None,
        created_at=row.created_at,
    )
