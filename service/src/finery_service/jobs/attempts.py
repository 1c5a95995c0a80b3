"""Begin and end of attempts, within the caller's transaction, on a job row that the caller has locked."""

from __future__ import annotations

from datetime import datetime, timedelta
from typing import Any

from sqlalchemy import func
from sqlmodel import select
from sqlmodel.ext.asyncio.session import AsyncSession

from finery.types.errors import ErrorDetail
from finery.types.ids import new_id
from finery.types.jobs import Intent, JobState
from finery.types.reasons import RULES, JobReason
from finery_scheduler.core.types import Placement
from finery_service.checkpoints.tables import CheckpointRow
from finery_service.clock import milliseconds
from finery_service.jobs import store
from finery_service.jobs.states import AttemptKind, JobView, Outcome
from finery_service.jobs.tables import AttemptRow, JobRow
from finery_service.usage import ledger


def view(job: JobRow) -> JobView:
    return JobView(
        state=JobState(job.state),
        intent=Intent(job.intent),
        intent_at=job.intent_at,
        faults=job.faults,
        not_before=job.not_before,
        ends_prepared=job.kind != "job",
    )


async def live(session: AsyncSession, job_id: str) -> AttemptRow | None:
    """The job's attempt that has not ended, locked; there is at most one."""
    statement = select(AttemptRow).where(AttemptRow.job_id == job_id, AttemptRow.state != "ended").with_for_update()
    return (await session.exec(statement, execution_options={"populate_existing": True})).one_or_none()


async def start(
    session: AsyncSession,
    job: JobRow,
    *,
    kind: AttemptKind,
    placements: tuple[Placement, ...],
    lease: timedelta,
    now: datetime,
) -> AttemptRow:
    """A new attempt under the next fence, from the job's last checkpoint. Its first lease covers launch and start."""
    job.fence += 1
    job.version += 1
    step = await checkpoint_step(session, job) or 0
    attempt = AttemptRow(
        tenant_id=job.tenant_id,
        id=new_id("att", milliseconds(now)),
        job_id=job.id,
        kind=kind,
        fence=job.fence,
        state="starting",
        placements=[{"node": place.node, "slots": place.slots} for place in placements],
        lease_expires_at=await store.database_now(session) + lease,
        resumed_from_step=step,
        granted_through=step,
        step=step,
        created_at=now,
    )
    session.add(attempt)
    await session.flush()
    await _tell(session, attempt, now, phase="started", resumed_from_step=step)
    return attempt


async def end(session: AsyncSession, job: JobRow, attempt: AttemptRow, *, reason: JobReason, now: datetime) -> None:
    """Fences the attempt off. The one place that voids what no checkpoint covers and sets the job back to it.

    The row stays due for clean-up (`cleaned_at` null) until the pool confirms that nothing is left.
    """
    attempt.state = "ended"
    attempt.reason = reason.value
    attempt.ended_at = now
    checkpoint = await checkpoint_step(session, job)
    await ledger.void(session, job, reason=reason.value, after_step=-1 if checkpoint is None else checkpoint)
    job.step = checkpoint or 0
    await session.flush()
    await _tell(session, attempt, now, phase="ended", reason=reason.value)


async def settle(
    session: AsyncSession, job: JobRow, outcome: Outcome, *, now: datetime, error: ErrorDetail | None = None
) -> None:
    """Writes what becomes of the (locked) job."""
    if outcome.faults is not None:
        job.faults = dict(outcome.faults)
    job.not_before = outcome.not_before
    if outcome.to is None:
        job.reason = outcome.reason.value if outcome.reason else None
        job.version += 1
        await session.flush()
        return
    if outcome.to is JobState.FAILED and error is None and outcome.reason is not None:
        error = _default_error(outcome.reason)
    if outcome.to is not JobState.FAILED:
        error = None
    if not await store.move(session, job.id, to=outcome.to, reason=outcome.reason, now=now, error=error):
        raise RuntimeError(f"job {job.id} cannot go from {job.state} to {outcome.to}: see jobs.states.TRANSITIONS")


async def checkpoint_step(session: AsyncSession, job: JobRow) -> int | None:
    """Of the job's last checkpoint; None without one."""
    if job.last_checkpoint_id is None:
        return None
    statement = select(CheckpointRow.step).where(CheckpointRow.id == job.last_checkpoint_id)
    return (await session.exec(statement)).one()


async def _tell(session: AsyncSession, attempt: AttemptRow, now: datetime, **what: Any) -> None:
    """`number` counts the attempts of a kind: the first training is attempt 1, however often the data was prepared."""
    earlier = select(func.count()).where(
        AttemptRow.job_id == attempt.job_id, AttemptRow.kind == attempt.kind, AttemptRow.fence <= attempt.fence
    )
    number = (await session.exec(earlier)).one()
    data = {"attempt": attempt.id, "number": number, "kind": attempt.kind, **what}
    await store.append_event(session, tenant=attempt.tenant_id, job=attempt.job_id, type="attempt", data=data, now=now)


def _default_error(reason: JobReason) -> ErrorDetail:
    blame = "server_error" if RULES[reason].pays == "platform" else "invalid_request_error"
    return ErrorDetail(message=RULES[reason].sentence, type=blame, code=reason.value)
