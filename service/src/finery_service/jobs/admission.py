"""Whether a job can be had as it is asked for, checked before anything is written."""

from __future__ import annotations

from dataclasses import asdict, dataclass
from datetime import datetime
from typing import Any

from sqlmodel.ext.asyncio.session import AsyncSession

from finery.types.environments import PromptsEnvironment
from finery.types.ids import new_id
from finery.types.jobs import JobState
from finery.types.methods import DpoJobCreate, JobCreate, RlJobCreate, SftJobCreate
from finery_service.auth.caller import Member
from finery_service.clock import milliseconds
from finery_service.environments import service as environments
from finery_service.environments import store as environment_store
from finery_service.errors import ServiceError, refusal
from finery_service.files import store as files
from finery_service.files.tables import FileRow
from finery_service.jobs import specs, specs_rl, starts
from finery_service.jobs.tables import JobRow
from finery_service.tenants import store as tenants
from finery_service.usage import prices

_TOLD = 20


@dataclass(frozen=True)
class _Source:
    """What a job learns from, as in its row."""

    training_file_id: str | None = None
    validation_file_id: str | None = None
    environment_id: str | None = None
    environment: dict[str, Any] | None = None


async def admit(session: AsyncSession, member: Member, body: JobCreate, now: datetime) -> JobRow:
    """The row to insert, its price book pinned. Raises 400 naming the field that cannot be had.

    An environment that came with the body has passed `environments.checks` already.
    """
    specs.check(body)
    start = await starts.find(session, member.tenant_id, body)
    model = start.model
    specs.check_added_tokens(start.spec)
    source = await _source(session, member, start.spec)
    spec = specs.settled(start.spec, model)
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
        price_book_id=(await prices.in_force(session, now)).id,
        name=spec.name,
        spec=spec.model_dump(mode="json"),
        priority=spec.priority,
        accelerators=spec.resources.accelerators,
        accelerator_type=spec.resources.accelerator_type,
        state=JobState.VALIDATING.value,
        created_at=now,
        **asdict(source),
    )


async def _source(session: AsyncSession, member: Member, spec: JobCreate) -> _Source:
    if isinstance(spec, RlJobCreate):
        return await _environment(session, member, spec)
    await _check_files(session, member.tenant_id, spec)
    return _Source(spec.training_file, spec.validation_file)


async def _environment(session: AsyncSession, member: Member, spec: RlJobCreate) -> _Source:
    environment, id_ = spec.environment, None
    if isinstance(environment, str):
        id_ = environment
        row = await environment_store.get(session, member.tenant_id, id_, lock="keep")
        if row is None:
            expected = "the id of one of your environments, or an environment"
            raise refusal("environment_not_found", "environment", expected, id_)
        environment = environments.spec_of(row.spec)
    await environments.check(session, member, environment, "environment")
    as_used = environment.model_dump(mode="json")
    if not isinstance(environment, PromptsEnvironment):
        specs_rl.check_prompts(spec.hyperparameters, environment.size, held_out=0)
        return _Source(environment_id=id_, environment=as_used)
    await _check_held_out(session, member.tenant_id, spec, environment)
    return _Source(environment.file, environment.held_out_file, id_, as_used)


async def _check_held_out(
    session: AsyncSession, tenant_id: str, spec: RlJobCreate, environment: PromptsEnvironment
) -> None:
    found = [await files.get(session, tenant_id, id_) for id_ in (environment.file, environment.held_out_file or "")]
    prompts, held_out = [file.rows if file is not None else None for file in found]
    assert prompts is not None, "environments.check keeps the file"
    specs_rl.check_held_out(spec.hyperparameters, prompts, held_out, "hyperparameters.eval_prompts")
    specs_rl.check_prompts(spec.hyperparameters, prompts, held_out)


async def _check_files(session: AsyncSession, tenant_id: str, spec: SftJobCreate | DpoJobCreate) -> None:
    training = await _file(session, tenant_id, spec.training_file, "training_file")
    specs.check_format(spec.method, training.format, "training_file")
    if isinstance(spec, SftJobCreate):
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
