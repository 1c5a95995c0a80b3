"""Whether a job can be had as it is asked for, checked before anything is written."""

from __future__ import annotations

from datetime import datetime

from sqlmodel.ext.asyncio.session import AsyncSession

from finery.types.ids import new_id
from finery.types.jobs import JobState
from finery.types.methods import JobCreate, LoraAdapter
from finery_service.auth.caller import Member
from finery_service.checkpoints import store as checkpoints
from finery_service.clock import milliseconds
from finery_service.errors import ServiceError
from finery_service.files import store as files
from finery_service.jobs import queries
from finery_service.jobs.tables import JobRow
from finery_service.models import service as models
from finery_service.models.tables import ModelRow
from finery_service.tenants import store as tenants
from finery_service.usage import prices

_TOLD = 20


async def admit(session: AsyncSession, member: Member, body: JobCreate, now: datetime) -> JobRow:
    """The row to insert, its price book pinned. Raises 400 naming the field that cannot be had."""
    _check_available(body)
    body, model = await _start(session, member.tenant_id, body)
    await _check_file(session, member.tenant_id, body.training_file, "training_file")
    if body.validation_file is not None:
        await _check_file(session, member.tenant_id, body.validation_file, "validation_file")
    if body.hyperparameters.max_length > model.max_length:
        expected = f"at most {model.max_length} tokens with {model.name}"
        raise _refusal("max_length_too_long", "hyperparameters.max_length", expected, body.hyperparameters.max_length)
    if body.project is not None and not await tenants.project_exists(session, member.tenant_id, body.project):
        raise _refusal("project_not_found", "project", "the id of one of your projects", body.project)
    return JobRow(
        tenant_id=member.tenant_id,
        id=new_id("job", milliseconds(now)),
        project_id=body.project or member.project_id,
        method=body.method,
        model_id=model.id,
        from_checkpoint_id=body.from_checkpoint,
        training_file_id=body.training_file,
        validation_file_id=body.validation_file,
        price_book_id=(await prices.in_force(session, now)).id,
        name=body.name,
        spec=body.model_dump(mode="json"),
        priority=body.priority,
        accelerators=body.resources.accelerators,
        accelerator_type=body.resources.accelerator_type,
        state=JobState.VALIDATING.value,
        created_at=now,
    )


def _check_available(body: JobCreate) -> None:
    wanted = {f"limits.{name}": value for name, value in body.limits if value is not None}
    if body.resources.accelerators > 1:
        wanted["resources.accelerators"] = body.resources.accelerators
    for param, value in wanted.items():
        expected = "1" if param == "resources.accelerators" else "null"
        raise _refusal("not_available", param, f"{expected}, as more is not available yet", value)


async def _start(session: AsyncSession, tenant_id: str, body: JobCreate) -> tuple[JobCreate, ModelRow]:
    """The base model, and the spec with the adapter that goes on from a checkpoint."""
    if body.from_checkpoint is None:
        assert body.model is not None, "the schema wants exactly one of the two"
        model = await models.find(session, body.model)
        if model is None:
            raise _refusal("model_not_found", "model", "the name or id of a model in the catalogue", body.model)
        return body, model
    checkpoint = await checkpoints.get(session, tenant_id, body.from_checkpoint)
    parent = await queries.get(session, tenant_id, checkpoint.job_id) if checkpoint else None
    if parent is None:
        raise _refusal("checkpoint_not_found", "from_checkpoint", "the id of a checkpoint", body.from_checkpoint)
    model = await models.find(session, parent.model_id)
    assert model is not None, "a job's model is never deleted"
    adapter = LoraAdapter.model_validate(parent.spec["adapter"])
    if "adapter" in body.model_fields_set and body.adapter != adapter:
        expected = "the checkpoint's own adapter (leave it out), as a new one on top is not available yet"
        raise _refusal("not_available", "adapter", expected, f"rank {body.adapter.rank}")
    return body.model_copy(update={"adapter": adapter}), model


async def _check_file(session: AsyncSession, tenant_id: str, file_id: str, param: str) -> None:
    file = await files.get(session, tenant_id, file_id)
    if file is None:
        raise _refusal("file_not_found", param, "the id of an uploaded file", file_id)
    if file.status != "valid":
        found = f"{file.error_count} in {file.id}"
        message = f"{param}: expected a file without errors, found {found}; see details, mend and upload it again."
        raise ServiceError(400, "invalid_file", message, param=param, details=file.errors[:_TOLD])


def _refusal(code: str, param: str, expected: str, found: object) -> ServiceError:
    message = f"{param}: expected {expected}, found {str(found)[:80]}."
    return ServiceError(400, code, message, param=param)
