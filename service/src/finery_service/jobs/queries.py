"""What the API reads about jobs, always within one tenant."""

from __future__ import annotations

from collections.abc import Sequence
from datetime import datetime
from typing import Any, NamedTuple

from sqlalchemy import ColumnElement, text
from sqlmodel import col, select
from sqlmodel.ext.asyncio.session import AsyncSession

from finery.types.jobs import JobState
from finery_service.jobs.tables import EventRow, JobHeadRow, JobRow

_FACTS = text("""
    select job.id, model.name, book.prices,
           (select count(*) from attempts where job_id = job.id and kind = 'train'),
           (select id from checkpoints
            where job_id = job.id and deleted_at is null and coalesce(-validation_reward, validation_loss) is not null
            order by coalesce(-validation_reward, validation_loss), step limit 1)
    from jobs job
    join models model on model.id = job.model_id
    join price_books book on book.id = job.price_book_id
    where job.id = any(:jobs)
""")


class Facts(NamedTuple):
    """What a job resource shows and the job's own row does not hold."""

    job_id: str
    model: str
    prices: dict[str, str]
    """US dollars per million units by SKU, of the pinned book."""
    attempts: int
    best_checkpoint: str | None


def jobs_of(tenant_id: str) -> tuple[ColumnElement[bool], ...]:
    """Jobs proper: a preview is none, nor is a run of an environment."""
    return col(JobRow.tenant_id) == tenant_id, col(JobRow.kind) == "job"


def filters(
    *,
    states: Sequence[JobState] = (),
    methods: Sequence[str] = (),
    project: str | None = None,
    created_after: datetime | None = None,
    created_before: datetime | None = None,
) -> list[ColumnElement[bool]]:
    """Only jobs in one of `states`, of one of `methods`, of the project, created strictly between the two times."""
    wanted: list[ColumnElement[bool]] = []
    if states:
        wanted.append(col(JobRow.state).in_([state.value for state in states]))
    if methods:
        wanted.append(col(JobRow.method).in_(methods))
    if project is not None:
        wanted.append(col(JobRow.project_id) == project)
    if created_after is not None:
        wanted.append(col(JobRow.created_at) > created_after)
    if created_before is not None:
        wanted.append(col(JobRow.created_at) < created_before)
    return wanted


async def get(session: AsyncSession, tenant_id: str, job_id: str, *, lock: bool = False) -> JobRow | None:
    statement = select(JobRow).where(*jobs_of(tenant_id), JobRow.id == job_id)
    if lock:
        statement = statement.with_for_update()
    return (await session.exec(statement)).one_or_none()


async def state(session: AsyncSession, tenant_id: str, job_id: str) -> str | None:
    return (await session.exec(select(JobRow.state).where(*jobs_of(tenant_id), JobRow.id == job_id))).one_or_none()


async def facts(session: AsyncSession, job_ids: Sequence[str]) -> dict[str, Facts]:
    rows: Any = await session.execute(_FACTS, {"jobs": list(job_ids)})
    return {row[0]: Facts._make(row) for row in rows}


async def head(session: AsyncSession, job_id: str) -> int:
    """`seq` of the last event."""
    return (await session.exec(select(JobHeadRow.seq).where(JobHeadRow.job_id == job_id))).one()


async def events_after(session: AsyncSession, tenant_id: str, job_id: str, seq: int, limit: int) -> list[EventRow]:
    statement = (
        select(EventRow)
        .where(EventRow.tenant_id == tenant_id, EventRow.job_id == job_id, EventRow.seq > seq)
        .order_by(col(EventRow.seq))
        .limit(limit)
    )
    return list((await session.exec(statement)).all())
