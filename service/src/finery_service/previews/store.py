"""Previews in the database. They live in `jobs`, as runs of environments do; what moves them is what moves jobs."""

from __future__ import annotations

from datetime import datetime, timedelta
from typing import cast

from sqlalchemy import CursorResult, func, text
from sqlmodel import col, select
from sqlmodel.ext.asyncio.session import AsyncSession

from finery.types.jobs import JobState
from finery_service.jobs.tables import JobRow
from finery_service.models.tables import ModelRow

KEPT = timedelta(days=1)
# Only those of which nothing can be left in the pool.
_FORGET = """
    with old as (
        select id from jobs where kind = '{kind}' and created_at < :before and finished_at is not null
        and not exists (select from attempts where job_id = jobs.id and cleaned_at is null)
        limit :count for update skip locked
    ),
    gone_events as (delete from events where job_id in (select id from old)),
    gone_heads as (delete from job_heads where job_id in (select id from old)),
    gone_attempts as (delete from attempts where job_id in (select id from old))
    delete from jobs where id in (select id from old)
"""
_FORGET_EACH = tuple(text(_FORGET.format(kind=kind)) for kind in ("preview", "run"))
"""Spelled out: each kind has a partial index."""


async def get(session: AsyncSession, tenant_id: str, file_id: str, preview_id: str) -> tuple[JobRow, ModelRow] | None:
    """The preview of this file, and its model."""
    statement = (
        select(JobRow, ModelRow)
        .join(ModelRow, col(ModelRow.id) == col(JobRow.model_id))
        .where(
            JobRow.tenant_id == tenant_id,
            JobRow.id == preview_id,
            JobRow.kind == "preview",
            JobRow.training_file_id == file_id,
        )
    )
    return (await session.exec(statement)).one_or_none()


async def pending(session: AsyncSession, tenant_id: str) -> int:
    """How many of the tenant's previews have not ended."""
    statement = select(func.count()).where(
        JobRow.tenant_id == tenant_id, JobRow.kind == "preview", JobRow.state == JobState.VALIDATING.value
    )
    return (await session.exec(statement)).one()


async def forget(session: AsyncSession, now: datetime, *, count: int = 1000) -> int:
    """Deletes previews and runs that are older than a day, at most so many of each; how many it was. As
    finery_system."""
    gone = 0
    for statement in _FORGET_EACH:
        result = await session.execute(statement, {"before": now - KEPT, "count": count})
        gone += cast(CursorResult[object], result).rowcount
    return gone
