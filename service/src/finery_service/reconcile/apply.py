"""Decisions into the database: a transaction each, under leader epoch, job lock and version; stale ones are dropped."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from datetime import timedelta

import structlog
from sqlalchemy import TextClause, text
from sqlalchemy.exc import InterfaceError, OperationalError
from sqlalchemy.exc import TimeoutError as PoolTimeoutError

from finery.types.jobs import Intent, JobState
from finery.types.reasons import JobReason
from finery_scheduler.core.types import Admission, Plan
from finery_service.jobs import attempts, states, store
from finery_service.jobs.tables import AttemptRow, JobRow
from finery_service.reconcile.context import Context
from finery_service.reconcile.lease import StaleLeaderError
from finery_service.reconcile.snapshot import Pool, View, attempt_view

_log = structlog.get_logger(__name__)
_WAIT = text("""
    update jobs set reason = :reason, queue_position = :position
    where id = :job and version = :version and state = :state
""")
_LAUNCHED = text("""
    update attempts set launched_at = clock_timestamp() where id = any(:ids) and launched_at is null
""")
_CLEANED = text("""
    update attempts set cleaned_at = clock_timestamp() where id = any(:ids) and state = 'ended' and cleaned_at is null
""")


async def lifecycle(context: Context, view: View, pool: Pool) -> bool:
    """Expiries, cancellations, prepare attempts: what is due by `states.decide`. True if anything changed."""
    room = _Room.of(view, context.settings.prepare_attempts)
    changed = False
    for job in room.in_turn(view.jobs, context.turns):
        if not context.patience.ready(job.id):
            continue
        attempt = view.live.get(job.id)
        word = pool.word(attempt.id if attempt else None)
        with _alone(context, job.id):
            decision = _decide(context, job, attempt, view, word)
            if decision == states.Decision() or (decision.prepare and not room.take(job)):
                continue
            if decision.prepare and _is_awaited(job):
                context.turns[job.tenant_id] = max(context.turns.values(), default=0) + 1
            changed = await _carry_out(context, job, word) or changed
    return changed


async def admit(context: Context, plan: Plan) -> bool:
    """Jobs that start now: state, attempt and fence in one transaction each. True if any did."""
    changed = False
    for admission in plan.admissions:
        with _alone(context, admission.job):
            changed = await _admit(context, admission) or changed
    return changed


async def explain(context: Context, plan: Plan, view: View, pool: Pool) -> None:
    """Why each waiting job waits; written only when it changed."""
    jobs = {job.id: job for job in view.jobs}
    due: list[tuple[JobRow, JobReason, int | None]] = [
        *((jobs[wait.job], wait.reason, wait.position) for wait in plan.waits),
        *_explain_validating(view, pool),
    ]
    rows = [
        {"job": job.id, "version": job.version, "state": job.state, "reason": reason.value, "position": position}
        for job, reason, position in due
        if (job.reason, job.queue_position) != (reason.value, position)
    ]
    if not rows:
        return
    async with context.apply() as session:
        # Several jobs are locked in sorted order. One batch: all positions change whenever the first of a queue starts.
        await session.execute(_WAIT, sorted(rows, key=lambda row: str(row["job"])))


async def launched(context: Context, attempt_ids: Sequence[str]) -> None:
    await _stamp(context, _LAUNCHED, attempt_ids)


async def cleaned(context: Context, attempt_ids: Sequence[str]) -> None:
    await _stamp(context, _CLEANED, attempt_ids)


async def launch_failed(context: Context, attempt: AttemptRow) -> None:
    async with context.apply() as session:
        job = await store.lock(session, attempt.job_id)
        current = await attempts.live(session, attempt.job_id)
        if job is None or current is None or current.id != attempt.id:
            return
        now = await store.database_now(session)
        reason = JobReason.LAUNCH_FAILED
        outcome = states.after_attempt(attempts.view(job), attempt_view(current).kind, reason, now, context.policy)
        await attempts.end(session, job, current, reason=reason, now=context.clock())
        await attempts.settle(session, job, outcome, now=context.clock())


def _is_awaited(job: JobRow) -> bool:
    """A preview of a file, or a run of an environment: somebody looks at it until it is there."""
    return job.kind != "job"


@dataclass
class _Room:
    """Prepare attempts that may still start. What is awaited (previews, runs of environments) goes first, as it is
    short; but it leaves jobs one place, so that no amount of it holds a job up. Tenants take turns at it: one's twenty
    runs, of a quarter of an hour each, are not all waited for. Where there is one place, age alone counts."""

    limit: int
    all: int
    awaited: int

    @classmethod
    def of(cls, view: View, limit: int) -> _Room:
        preparing = [job for job in view.jobs if job.id in view.live and view.live[job.id].kind == "prepare"]
        return cls(limit, limit - len(preparing), max(1, limit - 1) - sum(map(_is_awaited, preparing)))

    def in_turn(self, jobs: Sequence[JobRow], turns: Mapping[str, int]) -> list[JobRow]:
        """`jobs` by age; `turns`: see `Context`."""
        if self.limit == 1:
            return list(jobs)
        return sorted(jobs, key=lambda job: (not _is_awaited(job), _is_awaited(job) and turns.get(job.tenant_id, 0)))

    def take(self, job: JobRow) -> bool:
        """Whether there is a place for it, which it then has."""
        awaited = _is_awaited(job)
        if self.all <= 0 or (awaited and self.awaited <= 0):
            return False
        self.all -= 1
        self.awaited -= awaited
        return True


@contextmanager
def _alone(context: Context, job: str) -> Iterator[None]:
    """What is wrong with one job stays with it: the others are looked after. A database that is away concerns all."""
    try:
        yield
        context.patience.succeeded(job)
    except (StaleLeaderError, OperationalError, InterfaceError, PoolTimeoutError):
        raise
    except Exception:
        _log.exception("job_left_alone", job=job)
        context.patience.failed(job)


def _decide(
    context: Context, job: JobRow, attempt: AttemptRow | None, view: View, word: states.PoolWord
) -> states.Decision:
    live = attempt_view(attempt) if attempt else None
    return states.decide(attempts.view(job), live, now=view.now, pool=word, policy=context.policy)


async def _carry_out(context: Context, seen: JobRow, word: states.PoolWord) -> bool:
    """Decides again on the locked rows: a lease may have been renewed since the snapshot, without a new version."""
    async with context.apply() as session:
        job = await store.lock(session, seen.id)
        if job is None or job.version != seen.version:
            return False
        attempt = await attempts.live(session, job.id)
        live = attempt_view(attempt) if attempt else None
        now = await store.database_now(session)
        decision = states.decide(attempts.view(job), live, now=now, pool=word, policy=context.policy)
        if decision == states.Decision():
            return False
        if decision.prepare:
            await attempts.start(
                session, job, kind="prepare", placements=(), lease=_start_lease(context), now=context.clock()
            )
        if decision.end_attempt is not None and attempt is not None:
            await attempts.end(session, job, attempt, reason=decision.end_attempt, now=context.clock())
        if decision.outcome is not None:
            await attempts.settle(session, job, decision.outcome, now=context.clock())
        return True


async def _admit(context: Context, admission: Admission) -> bool:
    async with context.apply() as session:
        job = await store.lock(session, admission.job)
        if job is None or job.version != admission.version or job.state != JobState.QUEUED or job.intent != Intent.RUN:
            return False
        now = context.clock()
        await store.move(session, job.id, to=JobState.STARTING, reason=None, now=now)
        await attempts.start(
            session, job, kind="train", placements=admission.placements, lease=_start_lease(context), now=now
        )
        return True


def _explain_validating(view: View, pool: Pool) -> Iterable[tuple[JobRow, JobReason, None]]:
    """A job that waits for its preparation; one that backs off keeps the reason of its fault."""
    reason = JobReason.WAITING_FOR_VALIDATION if pool.reachable else JobReason.POOL_UNREACHABLE
    for job in view.jobs:
        backing_off = job.not_before is not None and job.not_before > view.now
        if job.state == JobState.VALIDATING and job.id not in view.live and not backing_off:
            yield job, reason, None
        elif job.state == JobState.VALIDATING and job.id in view.live:
            yield job, JobReason.WAITING_FOR_VALIDATION, None


async def _stamp(context: Context, statement: TextClause, attempt_ids: Sequence[str]) -> None:
    if attempt_ids:
        async with context.apply() as session:
            await session.execute(statement, {"ids": list(attempt_ids)})


def _start_lease(context: Context) -> timedelta:
    return timedelta(seconds=context.settings.start_seconds)
