from __future__ import annotations

from dataclasses import dataclass
from datetime import UTC, datetime
from typing import Any

from sqlalchemy import text
from sqlmodel.ext.asyncio.session import AsyncSession

# What was used before `start` is read too, as one sum a job and SKU: what a day costs is the rounded total so far minus
# that of the day before. Only of jobs that used something in the window: history that nobody asks about stays unread.
_BUCKETS = text("""
    select usage.job_id, usage.sku,
           case when usage.created_at >= :start
               then to_char(usage.created_at at time zone 'UTC', 'YYYY-MM-DD') else '' end as day,
           usage.created_at >= :start as is_asked,
           job.price_book_id,
           coalesce(sum(quantity) filter (where usage.state = 'billable'), 0) as billable,
           coalesce(sum(quantity) filter (where usage.state = 'provisional'), 0) as provisional,
           coalesce(sum(quantity) filter (where usage.state = 'void'), 0) as void
    from usage_records usage join jobs job on job.id = usage.job_id
    where usage.tenant_id = :tenant
      and usage.job_id in (
          select distinct job_id from usage_records
          where tenant_id = :tenant and created_at >= :start and created_at < :end
            and job_id = coalesce(:job, job_id)
      )
      and usage.created_at < :end
    group by 1, 2, 3, 4, 5
    order by 3, 4, 1, 2
""")
_EARLIEST, _LATEST = datetime.min.replace(tzinfo=UTC), datetime.max.replace(tzinfo=UTC)


@dataclass(frozen=True)
class Bucket:
    """Units of one SKU that one job used on one day (UTC)."""

    job: str
    sku: str
    day: str
    """Empty for all days before the start that was asked for."""
    is_asked: bool
    price_book: str
    billable: int
    provisional: int
    void: int


async def buckets(
    session: AsyncSession, tenant_id: str, *, job_id: str | None, start: datetime | None, end: datetime | None
) -> list[Bucket]:
    """By day, oldest first, up to `end` (exclusive)."""
    arguments = {"tenant": tenant_id, "job": job_id, "start": start or _EARLIEST, "end": end or _LATEST}
    rows: Any = await session.execute(_BUCKETS, arguments)
    return [Bucket(*row[:5], *map(int, row[5:])) for row in rows]
