"""What is: the pool as it answers, the open jobs and attempts in one short consistent read."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from datetime import datetime
from typing import Any, cast

import structlog
from sqlalchemy import ColumnElement, and_, or_, text
from sqlalchemy.ext.asyncio import AsyncEngine
from sqlalchemy.orm import defer
from sqlmodel import col, select

from finery.types.jobs import TERMINAL, Intent, JobState
from finery_scheduler.backend import Backend, PoolUnreachableError, WorkerStatus
from finery_scheduler.core.types import Demand, Node, Placement, Priority, RunningJob, Snapshot, WaitingJob
from finery_service.db.engine import transaction
from finery_service.jobs import store
from finery_service.jobs.states import AttemptView, PoolWord
from finery_service.jobs.tables import AttemptRow, JobRow

_log = structlog.get_logger(__name__)
_JUDGES = text("""
    select id, jsonb_path_query_array(environment, '$.grader.**.base_url') from jobs
    where id = any(:jobs) and environment is not null
""")
_UNREAD = (JobRow.spec, JobRow.error, JobRow.data, JobRow.preview, JobRow.environment, JobRow.run)


@dataclass(frozen=True, slots=True)
class Pool:
    """Read before the database: whatever it lists has its row there by then."""

    reachable: bool
    nodes: tuple[Node, ...] = ()
    workers: Mapping[str, WorkerStatus] | None = None

    def word(self, attempt_id: str | None) -> PoolWord:
        """What it says of an attempt; of no attempt `missing` when it answers at all."""
        if not self.reachable:
            return "unreachable"
        return (self.workers or {}).get(attempt_id, "missing") if attempt_id else "missing"


@dataclass(frozen=True, slots=True)
class View:
    now: datetime
    """The database's clock."""
    jobs: tuple[JobRow, ...]
    """Not terminal, oldest first, without what no decision looks at (`_UNREAD`)."""
    live: Mapping[str, AttemptRow]
    """By job."""
    uncleaned: tuple[AttemptRow, ...]
    """Ended, and the pool has not confirmed that nothing is left: they hold their slots until then."""


async def observe(backend: Backend) -> Pool:
    try:
        await backend.start()
        return Pool(True, await backend.nodes(), await backend.workers())
    except PoolUnreachableError:
        return Pool(False)
    except Exception:
        _log.exception("pool_not_observed")
        return Pool(False)


async def read(engine: AsyncEngine) -> View:
    async with transaction(engine) as session:
        await session.connection(execution_options={"isolation_level": "REPEATABLE READ"})
        jobs = (
            await session.exec(
                select(JobRow)
                .where(_open())
                .options(*(defer(cast(Any, column)) for column in _UNREAD))
                .order_by(col(JobRow.created_at), col(JobRow.id))
            )
        ).all()
        attempts = (await session.exec(select(AttemptRow).where(col(AttemptRow.cleaned_at).is_(None)))).all()
        now = await store.database_now(session)
    return View(
        now=now,
        jobs=tuple(jobs),
        live={attempt.job_id: attempt for attempt in attempts if attempt.state != "ended"},
        uncleaned=tuple(attempt for attempt in attempts if attempt.state == "ended"),
    )


async def judges(engine: AsyncEngine, jobs: Sequence[str]) -> dict[str, list[str]]:
    """Of those of `jobs` that have an environment: the model servers that its graders ask."""
    async with transaction(engine) as session:
        return dict((await session.execute(_JUDGES, {"jobs": list(jobs)})).tuples().all())


def attempt_view(attempt: AttemptRow) -> AttemptView:
    return AttemptView(
        kind="prepare" if attempt.kind == "prepare" else "train",
        running=attempt.state == "running",
        lease_expires_at=attempt.lease_expires_at,
        launched_at=attempt.launched_at,
    )


def to_snapshot(view: View, pool: Pool) -> Snapshot:
    """What `plan` reads. An attempt that is not cleaned up yet holds its slots under its own id."""
    by_id = {job.id: job for job in view.jobs}
    running = [_holder(by_id.get(job_id), job_id, attempt) for job_id, attempt in view.live.items()]
    running += [_holder(by_id.get(attempt.job_id), attempt.id, attempt) for attempt in view.uncleaned]
    return Snapshot(
        now=view.now,
        nodes=pool.nodes,
        pool_reachable=pool.reachable,
        waiting=tuple(_waiting(job) for job in view.jobs if is_waiting(job, view)),
        running=tuple(holder for holder in running if holder.placements),
    )


def is_waiting(job: JobRow, view: View) -> bool:
    """Queued, wanted, and not backing off after a fault."""
    backing_off = job.not_before is not None and job.not_before > view.now
    return job.state == JobState.QUEUED and job.intent == Intent.RUN and not backing_off


def placements(rows: Sequence[Mapping[str, Any]]) -> tuple[Placement, ...]:
    return tuple(Placement(row["node"], row["slots"]) for row in rows)


def _open() -> ColumnElement[bool]:
    """All that may have something due; spelled so that the partial index `jobs_open` serves it."""
    resting = [*sorted(TERMINAL), JobState.PAUSED]
    resumed = and_(col(JobRow.state) == JobState.PAUSED, col(JobRow.intent) != Intent.PAUSE)
    return or_(col(JobRow.state).not_in(resting), resumed)


def _waiting(job: JobRow) -> WaitingJob:
    return WaitingJob(
        id=job.id,
        version=job.version,
        tenant=job.tenant_id,
        project=job.project_id,
        demand=Demand(job.accelerators, job.accelerator_type),
        priority=cast(Priority, job.priority),
        queued_at=job.queued_at or job.created_at,
    )


def _holder(job: JobRow | None, id_: str, attempt: AttemptRow) -> RunningJob:
    held = placements(attempt.placements)
    return RunningJob(
        id=id_,
        version=job.version if job else 0,
        tenant=attempt.tenant_id,
        project=job.project_id if job else "",
        demand=Demand(sum(place.slots for place in held), job.accelerator_type if job else None),
        priority=cast(Priority, job.priority) if job else "normal",
        placements=held,
        started_at=attempt.created_at,
    )
