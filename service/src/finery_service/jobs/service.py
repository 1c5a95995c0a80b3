"""Jobs as tenants see them. The API writes a job and its intent; the reconciler moves its state."""

from __future__ import annotations

from collections.abc import Sequence
from datetime import datetime

from sqlalchemy import ColumnElement
from sqlmodel import col
from sqlmodel.ext.asyncio.session import AsyncSession

from finery.types.jobs import TERMINAL, Event, Intent, Job, JobState
from finery.types.methods import JobCreate, JobUpdate
from finery.types.pages import Page
from finery_service.auth.caller import Member
from finery_service.errors import ServiceError, not_found
from finery_service.http.paging import is_id, page_of, to_page
from finery_service.jobs import queries, store
from finery_service.jobs.admission import admit
from finery_service.jobs.tables import JobRow
from finery_service.jobs.views import to_event, to_job

_VERBS = {Intent.CANCEL: "cancel", Intent.PAUSE: "pause", Intent.RUN: "resume"}


async def submit(session: AsyncSession, member: Member, body: JobCreate, now: datetime) -> Job:
    """Raises 400 naming the field that cannot be had."""
    row = await admit(session, member, body, now)
    await store.insert(session, row, now)
    return await _to_job(session, row)


async def get(session: AsyncSession, tenant_id: str, job_id: str) -> Job:
    return await _to_job(session, await require(session, tenant_id, job_id))


async def list_page(
    session: AsyncSession, tenant_id: str, filters: Sequence[ColumnElement[bool]], *, after: str | None, limit: int
) -> Page[Job]:
    """Newest first."""
    rows, has_more = await page_of(
        session,
        JobRow,
        *queries.jobs_of(tenant_id),
        after=after,
        limit=limit,
        filters=filters,
        large=col(JobRow.environment),
    )
    facts = await queries.facts(session, [row.id for row in rows])
    return to_page([to_job(row, facts[row.id]) for row in rows], has_more)


async def update(session: AsyncSession, tenant_id: str, job_id: str, body: JobUpdate) -> Job:
    """Sets what is given: the name (null takes it away), the metadata (as a whole). Raises 400 if nothing is."""
    if not body.model_fields_set:
        raise ServiceError(400, "missing_field", "Expected name or metadata, found neither.", param="name")
    row = await require(session, tenant_id, job_id, lock=True)
    if "name" in body.model_fields_set:
        row.name = body.name
    if "metadata" in body.model_fields_set:
        row.customer_metadata = body.metadata
    await session.flush()
    return await _to_job(session, row)


async def intend(session: AsyncSession, tenant_id: str, job_id: str, intent: Intent) -> Job:
    """Cancel, pause, or (`run`) resume. A job that is as wanted, or on its way there, stays as it is.

    Raises 409 for a job that has ended otherwise, and for one that is to be cancelled: that is never withdrawn.
    """
    await require(session, tenant_id, job_id)
    row = await store.set_intent(session, job_id, intent)
    assert row is not None, "jobs are never deleted"
    if row.state in TERMINAL and not (row.state == JobState.CANCELLED and intent is Intent.CANCEL):
        found = f"one that has {row.state}" if row.state != JobState.CANCELLED else "one that was cancelled"
        message = f"Expected a job that has not ended, found {found}; there is nothing to {_VERBS[intent]}."
        raise _conflict("job_already_terminal", message, row)
    if row.intent == Intent.CANCEL and intent is not Intent.CANCEL:
        message = "Expected a job that is to go on, found one that is being cancelled; a cancel cannot be withdrawn."
        raise _conflict("job_is_being_cancelled", message, row)
    return await _to_job(session, row)


async def event_page(session: AsyncSession, tenant_id: str, job_id: str, *, after: int, limit: int) -> Page[Event]:
    """Raises 404 for an unknown job, 400 for an `after` that lies beyond the last event."""
    await check_cursor(session, tenant_id, job_id, after)
    rows = await queries.events_after(session, tenant_id, job_id, after, limit + 1)
    events = tuple(to_event(row) for row in rows[:limit])
    last_id = str(events[-1].seq) if events else None
    return Page(data=events, has_more=len(rows) > limit, last_id=last_id)


async def check_cursor(session: AsyncSession, tenant_id: str, job_id: str, after: int) -> str:
    """The job's state, if `after` is 0 or the `seq` of one of its events."""
    state = await require_state(session, tenant_id, job_id)
    head = await queries.head(session, job_id)
    if after > head:
        message = f"Expected the seq of an event of this job, at most {head}, found {after}; start again from there."
        raise ServiceError(400, "invalid_cursor", message, param="after", details=[{"last_seq": head}])
    return state


async def require(session: AsyncSession, tenant_id: str, job_id: str, *, lock: bool = False) -> JobRow:
    """The row, or 404, the same for an unknown job and for another tenant's. With `lock`, until the end of the
    transaction."""
    row = await queries.get(session, tenant_id, job_id, lock=lock) if is_id(job_id) else None
    if row is None:
        raise not_found("job", job_id)
    return row


async def require_state(session: AsyncSession, tenant_id: str, job_id: str) -> str:
    """As `require`, for whoever does not look at the row: an environment in it may be a megabyte."""
    state = await queries.state(session, tenant_id, job_id) if is_id(job_id) else None
    if state is None:
        raise not_found("job", job_id)
    return state


def _conflict(code: str, message: str, row: JobRow) -> ServiceError:
    return ServiceError(409, code, message, details=[{"state": row.state}], headers={"x-should-retry": "false"})


async def _to_job(session: AsyncSession, row: JobRow) -> Job:
    return to_job(row, (await queries.facts(session, [row.id]))[row.id])
