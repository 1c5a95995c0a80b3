"""Runs: answers graded in an environment before a job is started.

A run is a row of `jobs` of kind `run`. It goes the way of a job as far as the preparation, because graders run in a
worker's sandbox and never in this process, and there it ends: nothing is trained, metered or listed.
"""

from __future__ import annotations

from datetime import datetime

from sqlmodel.ext.asyncio.session import AsyncSession

from finery.types.environments import (
    EnvironmentRun,
    EnvironmentRunCreate,
    EnvironmentSpec,
    GradedAnswer,
    PromptsEnvironment,
    ShownPrompt,
)
from finery.types.errors import ErrorDetail
from finery.types.ids import new_id
from finery.types.jobs import JobState
from finery_service.auth.caller import Member
from finery_service.clock import milliseconds
from finery_service.environments import service, store
from finery_service.errors import ServiceError, not_found, refusal
from finery_service.files import store as files
from finery_service.http.paging import is_id
from finery_service.jobs import store as jobs
from finery_service.jobs.tables import JobRow
from finery_service.usage import prices

MAX_PENDING = 20
"""Of one tenant; about, if many ask in the same moment. All tenants' previews and runs share a few places."""
_STATUS = {JobState.SUCCEEDED: "ready", JobState.FAILED: "failed", JobState.CANCELLED: "failed"}


async def create(
    session: AsyncSession, member: Member, environment_id: str, body: EnvironmentRunCreate, now: datetime
) -> EnvironmentRun:
    """Raises 404 for the environment; 400 for a run that asks for nothing, and for an answer to a prompt that there is
    not; 429 for one too many at a time."""
    environment = await service.require(session, member.tenant_id, environment_id, lock="keep")
    spec = service.spec_of(environment.spec)
    if not body.answers and not body.prompts:
        raise refusal("nothing_to_do", "answers", "answers to grade, or a number of prompts to show", "neither")
    await _check_prompts(session, member.tenant_id, spec, body)
    if await store.pending_runs(session, member.tenant_id) >= MAX_PENDING:
        message = f"Expected at most {MAX_PENDING} runs that are not ready yet, found them; wait for one of them."
        raise ServiceError(429, "too_many_runs", message, headers={"retry-after": "5"})
    training, held_out = (spec.file, spec.held_out_file) if isinstance(spec, PromptsEnvironment) else (None, None)
    row = JobRow(
        tenant_id=member.tenant_id,
        id=new_id("erun", milliseconds(now)),
        project_id=environment.project_id,
        kind="run",
        method="rl",
        training_file_id=training,
        validation_file_id=held_out,
        environment_id=environment.id,
        environment=environment.spec,
        price_book_id=(await prices.in_force(session, now)).id,
        spec={},  # nothing is trained
        run={"request": body.model_dump(mode="json")},
        priority="normal",
        accelerators=1,
        state=JobState.VALIDATING.value,
        created_at=now,
    )
    await jobs.insert(session, row, now)
    return _to_run(row)


async def get(session: AsyncSession, tenant_id: str, environment_id: str, run_id: str) -> EnvironmentRun:
    """Raises 404 for an unknown environment or run, for another tenant's, and for one that is too old."""
    await service.require(session, tenant_id, environment_id)
    row = await store.get_run(session, tenant_id, environment_id, run_id) if is_id(run_id) else None
    if row is None:
        raise not_found("run", run_id)
    return _to_run(row)


async def _check_prompts(
    session: AsyncSession, tenant_id: str, spec: EnvironmentSpec, body: EnvironmentRunCreate
) -> None:
    """An answer's prompt may be one of those that are held out, which come after the others."""
    if not isinstance(spec, PromptsEnvironment):
        count = spec.size
    else:
        held_out = await files.get(session, tenant_id, spec.held_out_file) if spec.held_out_file else None
        file = await files.get(session, tenant_id, spec.file)
        count = sum(one.rows for one in (file, held_out) if one is not None)
    for place, answer in enumerate(body.answers):
        if answer.prompt >= count:
            param = f"answers[{place}].prompt"
            raise refusal("prompt_not_found", param, f"the place of one of {count} prompts, from 0", answer.prompt)


def _to_run(row: JobRow) -> EnvironmentRun:
    shown = row.run or {}
    return EnvironmentRun(
        id=row.id,
        environment=row.environment_id or "",
        status=_STATUS.get(JobState(row.state), "pending"),
        prompt_count=shown.get("prompt_count"),
        prompts=tuple(ShownPrompt.model_validate(found) for found in shown.get("prompts", ())),
        answers=tuple(GradedAnswer.model_validate(found) for found in shown.get("answers", ())),
        error=ErrorDetail.model_validate(row.error) if row.error else None,
        created_at=row.created_at,
    )
