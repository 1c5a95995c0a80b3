"""Usage as tenants see it: sums by job, SKU and day, with what they cost."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from datetime import datetime

from sqlmodel.ext.asyncio.session import AsyncSession

from finery.types.money import usd
from finery.types.pages import Page
from finery.types.usage import GroupBy, UsageRow
from finery_service.errors import ServiceError
from finery_service.jobs import service as jobs
from finery_service.usage import prices, store
from finery_service.usage.prices import Prices, cost_nanodollars
from finery_service.usage.store import Bucket

MAX_ROWS = 5000
"""Of an answer: more are refused, never cut off."""


async def usage_page(
    session: AsyncSession,
    tenant_id: str,
    *,
    job_id: str | None,
    start: datetime | None,
    end: datetime | None,
    group_by: Sequence[GroupBy],
) -> Page[UsageRow]:
    """One row per group in [start, end), all on one page. Raises 404 for an unknown job, 400 for too many groups."""
    if job_id is not None:
        await jobs.require_state(session, tenant_id, job_id)
    if start is not None and end is not None and start > end:
        message = "start: expected a time before end, found a later one; swap them."
        raise ServiceError(400, "invalid_value", message, param="start")
    buckets = await store.buckets(session, tenant_id, job_id=job_id, start=start, end=end)
    books = {name: await prices.pinned(session, name) for name in {bucket.price_book for bucket in buckets}}
    rows = grouped(buckets, books, group_by)
    if len(rows) > MAX_ROWS:
        message = (
            f"group_by: expected at most {MAX_ROWS} groups, found {len(rows)}; narrow start and end, name a job, or "
            "group by less."
        )
        raise ServiceError(400, "too_many_groups", message, param="group_by")
    return Page(data=tuple(rows))


@dataclass
class _Sum:
    billable: int = 0
    provisional: int = 0
    void: int = 0
    nanodollars: int = 0


def grouped(buckets: Iterable[Bucket], books: Mapping[str, Prices], group_by: Sequence[GroupBy]) -> list[UsageRow]:
    """Rows sorted by job, SKU and day. `buckets` come by day, oldest first, for every job from its beginning.

    However they are grouped, the costs of the rows add up to the same nano-dollar: each bucket costs the rounded
    cumulative amount of its job and SKU minus what the buckets before it cost.
    """
    used: dict[tuple[str, str], int] = defaultdict(int)
    sums: dict[tuple[str | None, ...], _Sum] = defaultdict(_Sum)
    if not group_by:
        sums[(None, None, None)] = _Sum()  # the total is a row even if it is nothing
    for bucket in buckets:
        book, line = books[bucket.price_book], (bucket.job, bucket.sku)
        before = cost_nanodollars({bucket.sku: used[line]}, book)
        used[line] += bucket.billable + bucket.provisional
        if not bucket.is_asked:
            continue
        total = sums[_key(bucket, group_by)]
        total.billable += bucket.billable
        total.provisional += bucket.provisional
        total.void += bucket.void
        total.nanodollars += cost_nanodollars({bucket.sku: used[line]}, book) - before
    return [_to_row(key, sums[key]) for key in sorted(sums, key=lambda key: [part or "" for part in key])]


def _key(bucket: Bucket, group_by: Sequence[GroupBy]) -> tuple[str | None, ...]:
    names = ("job", "sku", "day")
    return tuple(getattr(bucket, name) if name in group_by else None for name in names)


def _to_row(key: tuple[str | None, ...], total: _Sum) -> UsageRow:
    job, sku, day = key
    return UsageRow(
        job=job,
        sku=sku,
        day=day,
        quantity=total.billable + total.provisional,
        billable=total.billable,
        provisional=total.provisional,
        void=total.void,
        cost=usd(total.nanodollars),
    )
