"""The books: reservations equal what live attempts hold and never exceed the pool; sums equal their records."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence

from sqlalchemy import text
from sqlmodel import col, select
from sqlmodel.ext.asyncio.session import AsyncSession

from finery.types.jobs import JobState
from finery_scheduler.core.types import Node
from finery_service.jobs.tables import AttemptRow, JobRow

_KIND = {JobState.STARTING: "train", JobState.RUNNING: "train", JobState.VALIDATING: "prepare"}
_USAGE = text("""
    select job.id, job.usage, sums.usage from jobs job cross join lateral (
        select coalesce(jsonb_object_agg(sku, units), '{}') as usage from (
            select sku, sum(quantity) as units from usage_records
            where job_id = job.id and state <> 'void' group by sku having sum(quantity) > 0) as by_sku) as sums
    where job.state not in ('succeeded', 'failed', 'cancelled', 'paused') and job.usage <> sums.usage
""")
_NEEDS_ATTEMPT = frozenset({JobState.STARTING, JobState.RUNNING})


async def differences(session: AsyncSession, nodes: Sequence[Node] | None = None) -> list[str]:
    """Everything that is not as it must be, in words; empty when all is well. `nodes` None: the pool is not known."""
    statement = (
        select(AttemptRow, JobRow)
        .join(JobRow, col(JobRow.id) == col(AttemptRow.job_id))
        .where(col(AttemptRow.cleaned_at).is_(None))
    )
    held: Counter[str] = Counter()
    found: list[str] = []
    for attempt, job in (await session.exec(statement)).all():
        for place in attempt.placements:
            held[place["node"]] += place["slots"]
        if attempt.state != "ended":
            found += _attempt_differences(attempt, job)
    found += await _orphaned_states(session)
    found += await _usage_differences(session)
    if nodes is not None:
        slots = {node.id: node.slots for node in nodes}
        found += [
            f"node {node}: {count} slots held, {slots.get(node, 0)} there"
            for node, count in sorted(held.items())
            if count > slots.get(node, 0)
        ]
    return found


def _attempt_differences(attempt: AttemptRow, job: JobRow) -> list[str]:
    found = []
    if _KIND.get(JobState(job.state)) != attempt.kind:
        found.append(f"job {job.id} is {job.state} and has a live {attempt.kind} attempt {attempt.id}")
    if attempt.fence != job.fence:
        found.append(f"live attempt {attempt.id} has fence {attempt.fence}, its job {job.fence}")
    slots = sum(place["slots"] for place in attempt.placements)
    asked = job.accelerators if attempt.kind == "train" else 0
    if slots != asked:
        found.append(f"attempt {attempt.id} holds {slots} slots, its gang is {asked}")
    return found


async def _orphaned_states(session: AsyncSession) -> list[str]:
    live = select(AttemptRow.job_id).where(AttemptRow.state != "ended")
    statement = select(JobRow.id, JobRow.state).where(
        col(JobRow.state).in_(sorted(_NEEDS_ATTEMPT)), col(JobRow.id).not_in(live)
    )
    return [f"job {job} is {state} without a live attempt" for job, state in (await session.exec(statement)).all()]


async def _usage_differences(session: AsyncSession) -> list[str]:
    rows = (await session.execute(_USAGE)).all()
    return [f"job {job} carries usage {carried}, its records add up to {recorded}" for job, carried, recorded in rows]
