"""Jobs in the database. `move` is the only writer of `jobs.state`; it writes the event in the same transaction.

Lock order: the job's row, then everything else. The head row is held to commit, so `seq` is gapless and in
commit order.
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from datetime import datetime
from typing import Any

from sqlalchemy import func, text
from sqlmodel import select
from sqlmodel.ext.asyncio.session import AsyncSession

from finery.types.errors import ErrorDetail
from finery.types.jobs import TERMINAL, EventType, Intent, JobState
from finery.types.reasons import RULES, JobReason
from finery_service.jobs.states import allowed
from finery_service.jobs.tables import JobHeadRow, JobRow

_APPEND = text("""
    with head as (
        update job_heads set seq = seq + :count where job_id = :job and tenant_id = :tenant returning seq
    )
    insert into events (tenant_id, job_id, seq, type, data, created_at)
    select :tenant, :job, head.seq - :count + item.ordinality, item.value ->> 'type', item.value -> 'data', :now
    from head, jsonb_array_elements(cast(:items as jsonb)) with ordinality as item
    returning seq
""")


async def insert(session: AsyncSession, job: JobRow, now: datetime) -> None:
    """The job (state `validating`), its head and its first event. The caller pins the price book in `job`."""
    job.state = JobState.VALIDATING
    job.reason = JobReason.WAITING_FOR_VALIDATION
    session.add(job)
    await session.flush()
    session.add(JobHeadRow(tenant_id=job.tenant_id, job_id=job.id))
    await session.flush()
    data = _state_event(None, JobState.VALIDATING, JobReason.WAITING_FOR_VALIDATION, None)
    await append_event(session, tenant=job.tenant_id, job=job.id, type="state", data=data, now=now)


async def lock(session: AsyncSession, job_id: str) -> JobRow | None:
    """The job's row as it is now, locked until the transaction ends; None if there is none."""
    statement = select(JobRow).where(JobRow.id == job_id).with_for_update()
    return (await session.exec(statement, execution_options={"populate_existing": True})).one_or_none()


async def database_now(session: AsyncSession) -> datetime:
    """The database's clock, by which leases and back-off run."""
    now: datetime = (await session.exec(select(func.clock_timestamp()))).one()
    return now


async def set_intent(session: AsyncSession, job_id: str, intent: Intent) -> JobRow | None:
    """What the customer wants. Changes nothing once the job is terminal or is to be cancelled: look at the row."""
    job = await lock(session, job_id)
    if job is None or job.state in TERMINAL or job.intent in (intent, Intent.CANCEL):
        return job
    job.intent = intent
    job.intent_at = await database_now(session)
    job.version += 1
    await session.flush()
    return job


async def move(
    session: AsyncSession,
    job_id: str,
    *,
    to: JobState,
    reason: JobReason | None,
    now: datetime,
    expect_version: int | None = None,
    error: ErrorDetail | None = None,
) -> bool:
    """Compare and set: False, and nothing is written, if `to` is not allowed from the state that the job is in by
    now (a terminal state never changes) or the version is another one."""
    job = await lock(session, job_id)
    if job is None or expect_version not in (None, job.version):
        return False
    if not allowed(job.state, to, ends_prepared=job.kind != "job"):
        return False
    source, job.state = job.state, to.value
    job.reason = reason.value if reason else None
    job.version += 1
    job.queue_position = None
    if error is not None:
        job.error = error.model_dump(mode="json", exclude_none=True)
    _stamp(job, source, to, now)
    await session.flush()
    data = _state_event(source, to, reason, job.error if to in TERMINAL else None)
    await append_event(session, tenant=job.tenant_id, job=job.id, type="state", data=data, now=now)
    return True


async def append_event(
    session: AsyncSession,
    *,
    tenant: str,
    job: str,
    type: EventType,  # noqa: A002 - the event's own word
    data: dict[str, Any],
    now: datetime,
) -> int:
    """Returns the event's `seq`."""
    return await append_events(session, tenant=tenant, job=job, events=[(type, data)], now=now)


async def append_events(
    session: AsyncSession, *, tenant: str, job: str, events: Sequence[tuple[EventType, dict[str, Any]]], now: datetime
) -> int:
    """Appends in order, in one statement; returns the last `seq`. `data` holds finite numbers only."""
    if not events:
        raise ValueError("expected at least one event, found none")
    items = json.dumps([{"type": type_, "data": data} for type_, data in events], allow_nan=False)
    arguments = {"count": len(events), "job": job, "tenant": tenant, "items": items, "now": now}
    result = await session.execute(_APPEND, arguments)
    seqs = result.scalars().all()
    if len(seqs) != len(events):
        raise LookupError(f"expected a head row of job {job}, found none: jobs are created by jobs.store.insert")
    return int(max(seqs))


def _stamp(job: JobRow, source: str, to: JobState, now: datetime) -> None:
    """Clocks of several machines meet here: no time lies before the one that it follows."""
    if to is JobState.QUEUED and (job.queued_at is None or source == JobState.PAUSED):
        job.queued_at = max(now, job.created_at)  # after a fault the job keeps its place
    if to is JobState.RUNNING and job.started_at is None:
        job.started_at = max(now, job.created_at)
    if to in TERMINAL:
        job.finished_at = max(now, job.started_at or job.created_at)
        job.not_before = None


def _state_event(
    source: str | None, to: JobState, reason: JobReason | None, error: dict[str, Any] | None
) -> dict[str, Any]:
    data: dict[str, Any] = {
        "from": source,
        "to": to.value,
        "reason": reason.value if reason else None,
        "message": RULES[reason].sentence if reason else None,
    }
    return data if error is None else {**data, "error": error}
