"""The life of a job, pure: which moves are allowed, and what is due now. `docs/job-states.md` is tested against it.

Level-triggered: `decide` looks at a job, its live attempt, the time and the pool, never at what happened before.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from datetime import datetime, timedelta
from typing import Literal

from finery.types.jobs import TERMINAL, Intent, JobState
from finery.types.reasons import RULES, JobReason

AttemptKind = Literal["prepare", "train"]
PoolWord = Literal["alive", "dead", "missing", "unreachable"]
"""What the pool says of an attempt. `missing`: the pool answers and does not know it."""

TRANSITIONS: dict[JobState, frozenset[JobState]] = {
    JobState.VALIDATING: frozenset({JobState.QUEUED, JobState.FAILED, JobState.CANCELLED}),
    JobState.QUEUED: frozenset({JobState.STARTING, JobState.PAUSED, JobState.CANCELLED}),
    JobState.STARTING: frozenset(
        {JobState.RUNNING, JobState.QUEUED, JobState.PAUSED, JobState.FAILED, JobState.CANCELLED}
    ),
    JobState.RUNNING: frozenset(
        {JobState.QUEUED, JobState.PAUSED, JobState.SUCCEEDED, JobState.FAILED, JobState.CANCELLED}
    ),
    JobState.PAUSED: frozenset({JobState.QUEUED, JobState.CANCELLED}),
    JobState.SUCCEEDED: frozenset(),
    JobState.FAILED: frozenset(),
    JobState.CANCELLED: frozenset(),
}
PREPARED_TRANSITIONS: dict[JobState, frozenset[JobState]] = {
    JobState.VALIDATING: frozenset({JobState.SUCCEEDED, JobState.FAILED, JobState.CANCELLED})
}
"""A preview, or a run of an environment, ends with its preparation, so it never waits for an accelerator."""

_INTENDED = {
    Intent.CANCEL: (JobState.CANCELLED, JobReason.CANCELLED_BY_CUSTOMER),
    Intent.PAUSE: (JobState.PAUSED, JobReason.PAUSED_BY_CUSTOMER),
}
_NO_BACKOFF = frozenset({JobReason.PREEMPTED})
_MISSING_AFTER = timedelta(seconds=10)
"""A pool may list a fresh worker late; before this, `missing` says nothing."""


def allowed(source: str, target: str, *, ends_prepared: bool = False) -> bool:
    table = PREPARED_TRANSITIONS if ends_prepared else TRANSITIONS
    return JobState(target) in table.get(JobState(source), frozenset())


@dataclass(frozen=True, slots=True)
class JobView:
    state: JobState
    intent: Intent = Intent.RUN
    intent_at: datetime | None = None
    """When the intent was last changed."""
    faults: Mapping[str, int] | None = None
    """Attempts that ended so since the last checkpoint, by reason."""
    not_before: datetime | None = None
    ends_prepared: bool = False
    """It is no job but a preview or a run of an environment: it ends with its preparation."""


@dataclass(frozen=True, slots=True)
class AttemptView:
    kind: AttemptKind
    running: bool
    """It has made its first call."""
    lease_expires_at: datetime
    launched_at: datetime | None


@dataclass(frozen=True, slots=True)
class Policy:
    grace: timedelta = timedelta(seconds=60)
    """How long a running attempt may take to checkpoint and finish once it is told to stop."""
    backoff: timedelta = timedelta(seconds=1)
    """Wait before the second attempt; doubles with every further fault."""
    backoff_cap: timedelta = timedelta(seconds=60)


@dataclass(frozen=True, slots=True)
class Outcome:
    """What becomes of a job. `to` None: it stays in its state."""

    to: JobState | None = None
    reason: JobReason | None = None
    not_before: datetime | None = None
    faults: Mapping[str, int] | None = None
    """New counts; None leaves them."""


@dataclass(frozen=True, slots=True)
class Decision:
    """What is due now. All None and False: nothing."""

    prepare: bool = False
    """Start a prepare attempt (as far as their number is bounded)."""
    end_attempt: JobReason | None = None
    """End the live attempt so."""
    outcome: Outcome | None = None


def after_attempt(
    job: JobView, kind: AttemptKind, reason: JobReason, now: datetime, policy: Policy | None = None
) -> Outcome:
    """What becomes of a job whose attempt ended with `reason`."""
    final = RULES[reason].final
    if final == "succeeded":
        return _after_completion(job, kind, reason)
    if final == "failed" or final == "cancelled":
        return Outcome(JobState(final), reason, faults={})
    if job.intent is Intent.CANCEL:
        return Outcome(*_INTENDED[Intent.CANCEL])
    if final == "paused":
        return _after_pause(job, kind)
    return _after_fault(job, kind, reason, now, policy or Policy())


def decide(
    job: JobView, attempt: AttemptView | None, *, now: datetime, pool: PoolWord, policy: Policy | None = None
) -> Decision:
    """What is due for a job. `now` is the database's clock; `pool` speaks of the live attempt (or, without one,
    `missing` when the pool answers)."""
    policy = policy or Policy()
    if job.state in TERMINAL:
        return Decision()
    if attempt is None:
        return _decide_without_attempt(job, now, pool)
    stop = _stop_by_intent(job, attempt, now, policy)
    if stop is not None:
        return stop
    lost = _lost(attempt, now, pool)
    if lost is None:
        return Decision()
    return Decision(end_attempt=lost, outcome=after_attempt(job, attempt.kind, lost, now, policy))


def _after_completion(job: JobView, kind: AttemptKind, reason: JobReason) -> Outcome:
    if kind == "train":
        return Outcome(JobState.SUCCEEDED, reason, faults={})
    if job.intent is Intent.CANCEL:
        return Outcome(*_INTENDED[Intent.CANCEL])
    if job.ends_prepared:
        return Outcome(JobState.SUCCEEDED, JobReason.COMPLETED, faults={})
    return Outcome(JobState.QUEUED, JobReason.WAITING_FOR_PLACEMENT, faults={})


def _after_pause(job: JobView, kind: AttemptKind) -> Outcome:
    """The worker was told to pause, and by now the customer may want the job to go on: that is no fault of anybody."""
    if kind == "prepare":
        return Outcome(None, JobReason.WAITING_FOR_VALIDATION)
    if job.intent is Intent.RUN:
        return Outcome(JobState.QUEUED, JobReason.WAITING_FOR_PLACEMENT)
    return Outcome(*_INTENDED[Intent.PAUSE])


def _after_fault(job: JobView, kind: AttemptKind, reason: JobReason, now: datetime, policy: Policy) -> Outcome:
    faults = dict(job.faults or {})
    count = faults[reason.value] = faults.get(reason.value, 0) + 1
    if count >= RULES[reason].retries:
        return Outcome(JobState.FAILED, JobReason.TOO_MANY_FAULTS, faults=faults)
    if kind == "train" and job.intent is Intent.PAUSE:
        return Outcome(*_INTENDED[Intent.PAUSE], faults=faults)
    wait = timedelta() if reason in _NO_BACKOFF else min(policy.backoff * 2 ** min(count - 1, 30), policy.backoff_cap)
    to = None if kind == "prepare" else JobState.QUEUED
    return Outcome(to, reason, not_before=now + wait if wait else None, faults=faults)


def _decide_without_attempt(job: JobView, now: datetime, pool: PoolWord) -> Decision:
    if job.intent is Intent.CANCEL:
        return Decision(outcome=Outcome(*_INTENDED[Intent.CANCEL]))
    if job.state is JobState.QUEUED and job.intent is Intent.PAUSE:
        return Decision(outcome=Outcome(*_INTENDED[Intent.PAUSE]))
    if job.state is JobState.PAUSED and job.intent is Intent.RUN:
        return Decision(outcome=Outcome(JobState.QUEUED, JobReason.WAITING_FOR_PLACEMENT))
    backing_off = job.not_before is not None and job.not_before > now
    if job.state is JobState.VALIDATING and pool != "unreachable" and not backing_off:
        return Decision(prepare=True)
    return Decision()


def _stop_by_intent(job: JobView, attempt: AttemptView, now: datetime, policy: Policy) -> Decision | None:
    if job.intent is Intent.RUN or (job.intent is Intent.PAUSE and attempt.kind == "prepare"):
        return None
    if attempt.kind == "train" and attempt.running and job.intent_at is not None and now < job.intent_at + policy.grace:
        return None  # the worker is told in its orders; it checkpoints and finishes
    to, reason = _INTENDED[job.intent]
    return Decision(end_attempt=reason, outcome=Outcome(to, reason))


def _lost(attempt: AttemptView, now: datetime, pool: PoolWord) -> JobReason | None:
    if pool == "dead":
        return JobReason.WORKER_LOST
    if attempt.lease_expires_at < now:
        return JobReason.LAUNCH_FAILED if attempt.launched_at is None else JobReason.WORKER_LOST
    never_begun = not attempt.running and attempt.launched_at is not None and attempt.launched_at + _MISSING_AFTER < now
    return JobReason.WORKER_LOST if pool == "missing" and never_begun else None
