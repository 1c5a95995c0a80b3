"""Metered usage. Keyed (job, SKU, unit of work); provisional until a checkpoint covers it, void if none ever does.

`jobs.usage` carries the sums of what is not void, so that neither a commit nor a list adds up all steps of a job. Only
this module writes either; the reconciler's audit compares the two.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from datetime import datetime
from typing import cast

from sqlalchemy import CursorResult, text, update
from sqlalchemy.dialects.postgresql import insert
from sqlmodel import col
from sqlmodel.ext.asyncio.session import AsyncSession

from finery.types.usage import UsageState
from finery_service.jobs.tables import JobRow
from finery_service.usage.tables import UsageRecordRow

_VOID = text("""
    with voided as (
        update usage_records set state = 'void', void_reason = :reason
        where job_id = :job and state = 'provisional' and step > :step returning sku, quantity
    )
    select sku, cast(sum(quantity) as bigint), count(*) from voided group by sku
""")


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

    `job` is locked in this session. Returns those that were added.
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
    new = [item for item in records if (item.sku, item.unit) in added]
    job.usage = plus(job.usage, *new)
    return new


def plus(usage: Mapping[str, int], *records: Record) -> dict[str, int]:
    """`usage` (units by SKU, none of them 0) and what `records` add to it."""
    total = Counter(usage)
    for record in records:
        total[record.sku] += record.quantity
    return dict(+total)


async def make_billable(session: AsyncSession, job_id: str, *, through_step: int) -> int:
    """Provisional records of steps up to `through_step` become billable; returns how many."""
    statement = (
        update(UsageRecordRow)
        .where(
            col(UsageRecordRow.job_id) == job_id,
            col(UsageRecordRow.state) == UsageState.PROVISIONAL.value,
            col(UsageRecordRow.step) <= through_step,
        )
        .values(state=UsageState.BILLABLE.value)
        .execution_options(synchronize_session=False)
    )
    return cast(CursorResult[object], await session.execute(statement)).rowcount


async def void(session: AsyncSession, job: JobRow, *, reason: str, after_step: int) -> int:
    """Provisional records of steps after `after_step` are never billed; kept, with the reason. Returns how many.

    `job` is locked in this session.
    """
    rows = (await session.execute(_VOID, {"job": job.id, "reason": reason, "step": after_step})).all()
    gone = {sku: units for sku, units, _ in rows}
    job.usage = dict(Counter(job.usage) - Counter(gone))
    return sum(count for _, _, count in rows)
