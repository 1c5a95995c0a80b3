"""Whether a job can be had as it is asked for, checked before anything is written."""

from __future__ import annotations

from datetime import datetime

from sqlmodel.ext.asyncio.session import AsyncSession

from finery.types.ids import new_id
from finery.types.jobs import JobState
from finery.types.methods import JobCreate
from finery_service.auth.caller import Member
from finery_service.clock import milliseconds
from finery_service.errors import ServiceError, refusal
from finery_service.files import store as files
from finery_service.files.tables import FileRow
from finery_service.jobs import specs, starts
from finery_service.jobs.tables import JobRow
from finery_service.tenants import store as tenants
from finery_service.usage import prices

_TOLD = 20


async def admit(session: AsyncSession, member: Member, body: JobCreate, now: datetime) -> JobRow:
    """The row to insert, its price book pinned. Raises 400 naming the field that cannot be had."""
    specs.check(body)
    start = await starts.find(session, member.tenant_id, body)
    spec, model = start.spec, start.model
    specs.check_added_tokens(spec)
    await _check_files(session, member.tenant_id, spec)
    length = specs.fitting_length(spec.hyperparameters, model, "hyperparameters.max_length")
    spec = spec.model_copy(update={"hyperparameters": spec.hyperparameters.model_copy(update={"max_length": length})})
    if spec.project is not None and not await tenants.project_exists(session, member.tenant_id, spec.project):
        raise refusal("project_not_found", "project", "the id of one of your projects", spec.project)
    return JobRow(
        tenant_id=member.tenant_id,
        id=new_id("job", milliseconds(now)),
        project_id=spec.project or member.project_id,
        method=spec.method,
        model_id=model.id,
        base=start.base,
        from_checkpoint_id=spec.from_checkpoint,
        training_file_id=spec.training_file,
        validation_file_id=spec.validation_file,
        price_book_id=(await prices.in_force(session, now)).id,
        name=spec.name,
        spec=spec.model_dump(mode="json"),
        priority=spec.priority,
        accelerators=spec.resources.accelerators,
        accelerator_type=spec.resources.accelerator_type,
        state=JobState.VALIDATING.value,
        created_at=now,
    )


async def _check_files(session: AsyncSession, tenant_id: str, spec: JobCreate) -> None:
    training = await _file(session, tenant_id, spec.training_file, "training_file")
    specs.check_train_on(spec.hyperparameters.train_on, training.format, "hyperparameters.train_on")
    if spec.validation_file is None:
        return
    validation = await _file(session, tenant_id, spec.validation_file, "validation_file")
    if validation.format != training.format:
        expected = f"a file of {training.format} rows, as the training file is"
        raise refusal("format_mismatch", "validation_file", expected, f"one of {validation.format} rows")


async def _file(session: AsyncSession, tenant_id: str, file_id: str, param: str) -> FileRow:
    """It stays undeleted until the transaction ends."""
    file = await files.get(session, tenant_id, file_id)
    if file is not None:
        await session.refresh(file, with_for_update={"read": True})
    if file is None or file.deleted_at is not None:
        raise refusal("file_not_found", param, "the id of an uploaded file", file_id)
    if file.status != "valid":
        found = f"{file.error_count} in {file.id}"
        message = f"{param}: expected a file without errors, found {found}; see details, mend and upload it again."
        raise ServiceError(400, "invalid_file", message, param=param, details=file.errors[:_TOLD])
    return file
