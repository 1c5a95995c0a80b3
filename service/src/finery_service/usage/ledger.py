"""Metered usage. Keyed (job, SKU, unit of work); provisional until a checkpoint covers it, void if none ever does."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from datetime import datetime
from typing import cast

from sqlalchemy import ColumnElement, CursorResult, and_, func, text, update
from sqlalchemy.dialects.postgresql import insert
from sqlmodel import col, select
from sqlmodel.ext.asyncio.session import AsyncSession

from finery.types.usage import UsageState
from finery_service.jobs.tables import JobRow
from finery_service.usage.tables import UsageRecordRow


@dataclass(frozen=True, slots=True)
class Record:
    sku: str
    unit: str
    """`step:n`, `eval:n`"""
    step: int
    """A checkpoint at or after it makes the record billable."""
    quantity: int


async def record(
    session: AsyncSession, job: JobRow, attempt_id: str, records: Sequence[Record], now: datetime
) -> list[Record]:
    """Adds provisional records, in one statement; a unit of work that is recorded already stays as it is.

    Returns those that were added.
    """
    if not records:
        return []
    rows = [
        {
            "tenant_id": job.tenant_id,
            "project_id": job.project_id,
            "job_id": job.id,
            "attempt_id": attempt_id,
            "sku": item.sku,
            "unit": item.unit,
            "step": item.step,
            "quantity": item.quantity,
            "state": UsageState.PROVISIONAL.value,
            "created_at": now,
        }
        for item in records
    ]
    statement = insert(UsageRecordRow).values(rows)
    result = await session.execute(
        statement.on_conflict_do_nothing(
            index_elements=["job_id", "sku", "unit"], index_where=text("state <> 'void'")
        ).returning(col(UsageRecordRow.sku), col(UsageRecordRow.unit))
    )
    added = {(sku, unit) for sku, unit in result.all()}
    return [item for item in records if (item.sku, item.unit) in added]


async def make_billable(session: AsyncSession, job_id: str, *, through_step: int) -> int:
    """Provisional records of steps up to `through_step` become billable; returns how many."""
    statement = (
        update(UsageRecordRow)
        .where(_provisional(job_id), col(UsageRecordRow.step) <= through_step)
        .values(state=UsageState.BILLABLE.value)
        .execution_options(synchronize_session=False)
    )
    return cast(CursorResult[object], await session.execute(statement)).rowcount


async def void(session: AsyncSession, job_id: str, *, reason: str, after_step: int) -> int:
    """Provisional records of steps after `after_step` are never billed; kept, with the reason. Returns how many."""
    statement = (
        update(UsageRecordRow)
        .where(_provisional(job_id), col(UsageRecordRow.step) > after_step)
        .values(state=UsageState.VOID.value, void_reason=reason)
        .execution_options(synchronize_session=False)
    )
    return cast(CursorResult[object], await session.execute(statement)).rowcount


async def totals(session: AsyncSession, job_id: str) -> dict[str, int]:
    """Units by SKU, billable and provisional."""
    statement = (
        select(UsageRecordRow.sku, func.sum(UsageRecordRow.quantity))
        .where(UsageRecordRow.job_id == job_id, UsageRecordRow.state != UsageState.VOID.value)
        .group_by(UsageRecordRow.sku)
    )
    return {sku: int(total) for sku, total in (await session.exec(statement)).all()}


def _provisional(job_id: str) -> ColumnElement[bool]:
    return and_(
        col(UsageRecordRow.job_id) == job_id,
        col(UsageRecordRow.state) == UsageState.PROVISIONAL.value,
    )
