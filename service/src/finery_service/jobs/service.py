"""Jobs as tenants see them. The API writes a job and its intent; the reconciler moves its state."""

from __future__ import annotations

from datetime import datetime

from sqlmodel.ext.asyncio.session import AsyncSession

from finery.types.errors import ErrorDetail
from finery.types.jobs import TERMINAL, Event, Intent, Job, JobState, Progress
from finery.types.methods import JobCreate
from finery.types.pages import Page
from finery.types.reasons import RULES, JobReason
from finery_service.auth.caller import Member
from finery_service.errors import ServiceError, not_found
from finery_service.http.paging import is_id, page_of, to_page
from finery_service.jobs import queries, store
from finery_service.jobs.admission import admit
from finery_service.jobs.queries import Facts
from finery_service.jobs.tables import EventRow, JobRow
from finery_service.usage.prices import cost_usd


async def submit(session: AsyncSession, member: Member, body: JobCreate, now: datetime) -> Job:
    """Raises 400 naming the field that cannot be had."""
    row = await admit(session, member, body, now)
    await store.insert(session, row, now)
    return await _to_job(session, row)


async def get(session: AsyncSession, tenant_id: str, job_id: str) -> Job:
    return await _to_job(session, await require(session, tenant_id, job_id))


async def list_page(session: AsyncSession, tenant_id: str, *, after: str | None, limit: int) -> Page[Job]:
    rows, has_more = await page_of(session, JobRow, JobRow.tenant_id == tenant_id, after=after, limit=limit)
    facts = await queries.facts(session, [row.id for row in rows])
    return to_page([to_job(row, facts[row.id]) for row in rows], has_more)


async def cancel(session: AsyncSession, tenant_id: str, job_id: str) -> Job:
    """Sets the intent; a job that is cancelled or is to be cancelled stays as it is. 409 if it ended otherwise."""
    await require(session, tenant_id, job_id)
    row = await store.set_intent(session, job_id, Intent.CANCEL)
    assert row is not None, "jobs are never deleted"
    if row.state in TERMINAL and row.state != JobState.CANCELLED:
        message = f"Expected a job that has not ended, found one that has {row.state}; there is nothing to cancel."
        details, headers = [{"state": row.state}], {"x-should-retry": "false"}
        raise ServiceError(409, "job_already_terminal", message, details=details, headers=headers)
    return await _to_job(session, row)


async def event_page(session: AsyncSession, tenant_id: str, job_id: str, *, after: int, limit: int) -> Page[Event]:
    """Raises 404 for an unknown job, 400 for an `after` that lies beyond the last event."""
    await check_cursor(session, tenant_id, job_id, after)
    rows = await queries.events_after(session, tenant_id, job_id, after, limit + 1)
    events = tuple(to_event(row) for row in rows[:limit])
    last_id = str(events[-1].seq) if events else None
    return Page(data=events, has_more=len(rows) > limit, last_id=last_id)


async def check_cursor(session: AsyncSession, tenant_id: str, job_id: str, after: int) -> JobRow:
    """The job, if `after` is 0 or the `seq` of one of its events."""
    row = await require(session, tenant_id, job_id)
    head = await queries.head(session, job_id)
    if after > head:
        message = f"Expected the seq of an event of this job, at most {head}, found {after}; start again from there."
        raise ServiceError(400, "invalid_cursor", message, param="after", details=[{"last_seq": head}])
    return row


async def require(session: AsyncSession, tenant_id: str, job_id: str) -> JobRow:
    """The row, or 404, the same for an unknown job and for another tenant's."""
    row = await queries.get(session, tenant_id, job_id) if is_id(job_id) else None
    if row is None:
        raise not_found("job", job_id)
    return row


async def _to_job(session: AsyncSession, row: JobRow) -> Job:
    return to_job(row, (await queries.facts(session, [row.id]))[row.id])


def to_job(row: JobRow, facts: Facts) -> Job:
    spec = row.spec
    trained = sum(units for sku, units in row.usage.items() if sku.startswith("train."))
    return Job(
        id=row.id,
        project=row.project_id,
        method=row.method,
        model=facts.model,
        from_checkpoint=row.from_checkpoint_id,
        training_file=row.training_file_id,
        validation_file=row.validation_file_id,
        name=row.name,
        metadata=spec["metadata"],
        seed=spec["seed"],
        adapter=spec["adapter"],
        hyperparameters=spec["hyperparameters"],
        resources=spec["resources"],
        priority=row.priority,
        limits=spec["limits"],
        state=row.state,
        reason=row.reason,
        message=_sentence(row.reason),
        position=row.queue_position if row.state == JobState.QUEUED else None,
        intent=row.intent,
        progress=Progress(step=row.step, total_steps=row.total_steps, trained_tokens=trained),
        usage=row.usage,
        cost=cost_usd(row.usage, facts.prices),
        error=ErrorDetail.model_validate(row.error) if row.error else None,
        attempts=facts.attempts,
        created_at=row.created_at,
        queued_at=row.queued_at,
        started_at=row.started_at,
        finished_at=row.finished_at,
    )


def _sentence(reason: str | None) -> str | None:
    return RULES[JobReason(reason)].sentence if reason in frozenset(JobReason) else None


def to_event(row: EventRow) -> Event:
    return Event(job=row.job_id, seq=row.seq, type=row.type, data=row.data, created_at=row.created_at)
