"""The pure life of a job, and its published table."""

from __future__ import annotations

import re
from dataclasses import replace
from datetime import UTC, datetime, timedelta
from pathlib import Path

import pytest

from finery.types.jobs import TERMINAL, Intent, JobState
from finery.types.reasons import RULES, JobReason
from finery_service.jobs.states import (
    PREPARED_TRANSITIONS,
    TRANSITIONS,
    AttemptKind,
    AttemptView,
    Decision,
    JobView,
    Outcome,
    after_attempt,
    allowed,
    decide,
)

NOW = datetime(2026, 12, 1, 9, 0, tzinfo=UTC)
PAST, FUTURE = NOW - timedelta(seconds=1), NOW + timedelta(seconds=1)
LIVE = AttemptView(kind="train", running=True, lease_expires_at=FUTURE, launched_at=PAST)
OPEN = [state for state in JobState if state not in TERMINAL]
CANCELLED = Outcome(JobState.CANCELLED, JobReason.CANCELLED_BY_CUSTOMER)
PAUSED = Outcome(JobState.PAUSED, JobReason.PAUSED_BY_CUSTOMER)
REQUEUED = Outcome(JobState.QUEUED, JobReason.WAITING_FOR_PLACEMENT)
PREPARING = replace(LIVE, kind="prepare")
STARTING = replace(LIVE, running=False)


@pytest.mark.parametrize("state", sorted(TERMINAL))
def test_e10_a_terminal_state_has_no_way_out_and_nothing_due(state: JobState) -> None:
    assert TRANSITIONS[state] == frozenset()
    for intent in Intent:
        assert decide(JobView(state, intent), None, now=NOW, pool="missing") == Decision()


def test_every_open_state_reaches_a_terminal_one_and_can_be_cancelled() -> None:
    for state in OPEN:
        assert allowed(state, JobState.CANCELLED)
    assert not allowed("queued", "running")
    assert not allowed("validating", "starting")


@pytest.mark.parametrize("state", [JobState.VALIDATING, JobState.QUEUED, JobState.PAUSED])
def test_e11_cancel_needs_no_worker_when_none_is_live(state: JobState) -> None:
    job = JobView(state, Intent.CANCEL, not_before=FUTURE)
    assert decide(job, None, now=NOW, pool="missing") == Decision(outcome=CANCELLED)
    assert decide(job, None, now=NOW, pool="unreachable") == Decision(outcome=CANCELLED)


def test_e11_cancel_of_a_running_worker_waits_for_its_grace_then_ends_it() -> None:
    job = JobView(JobState.RUNNING, Intent.CANCEL, intent_at=NOW - timedelta(seconds=59))
    assert decide(job, LIVE, now=NOW, pool="alive") == Decision()
    late = replace(job, intent_at=NOW - timedelta(seconds=60))
    ended = Decision(end_attempt=JobReason.CANCELLED_BY_CUSTOMER, outcome=CANCELLED)
    assert decide(late, LIVE, now=NOW, pool="alive") == ended


def test_e11_cancel_of_a_job_on_a_dead_node_ends_with_its_lease() -> None:
    job = JobView(JobState.RUNNING, Intent.CANCEL, intent_at=PAST)
    assert decide(job, LIVE, now=NOW, pool="unreachable") == Decision()
    dead = replace(LIVE, lease_expires_at=PAST)
    ended = Decision(end_attempt=JobReason.WORKER_LOST, outcome=CANCELLED)
    assert decide(job, dead, now=NOW, pool="unreachable") == ended


@pytest.mark.parametrize("kind", ["prepare", "train"])
def test_cancel_before_the_worker_trains_ends_the_attempt_at_once(kind: AttemptKind) -> None:
    state = JobState.VALIDATING if kind == "prepare" else JobState.STARTING
    attempt = replace(LIVE, kind=kind, running=kind == "prepare")
    decision = decide(JobView(state, Intent.CANCEL, intent_at=NOW), attempt, now=NOW, pool="alive")
    assert decision == Decision(end_attempt=JobReason.CANCELLED_BY_CUSTOMER, outcome=CANCELLED)


def test_an_unreachable_pool_expires_nothing_before_the_lease() -> None:
    for running in (True, False):
        attempt = replace(LIVE, running=running, launched_at=NOW - timedelta(seconds=100))
        assert decide(JobView(JobState.RUNNING), attempt, now=NOW, pool="unreachable") == Decision()


def test_a_lease_that_ran_out_requeues_with_back_off() -> None:
    attempt = replace(LIVE, lease_expires_at=PAST)
    decision = decide(JobView(JobState.RUNNING), attempt, now=NOW, pool="alive")
    assert decision.end_attempt is JobReason.WORKER_LOST
    wait = NOW + timedelta(seconds=1)
    assert decision.outcome == Outcome(JobState.QUEUED, JobReason.WORKER_LOST, wait, {"worker_lost": 1})


def test_the_pools_word_dead_counts_at_once_and_missing_only_before_the_first_call() -> None:
    assert decide(JobView(JobState.RUNNING), LIVE, now=NOW, pool="dead").end_attempt is JobReason.WORKER_LOST
    old = replace(LIVE, launched_at=NOW - timedelta(seconds=11))
    assert decide(JobView(JobState.RUNNING), old, now=NOW, pool="missing") == Decision()
    starting = replace(old, running=False)
    assert decide(JobView(JobState.STARTING), starting, now=NOW, pool="missing").end_attempt is JobReason.WORKER_LOST
    fresh = replace(starting, launched_at=NOW - timedelta(seconds=9))
    assert decide(JobView(JobState.STARTING), fresh, now=NOW, pool="missing") == Decision()


@pytest.mark.parametrize(("reason", "attempts"), [(JobReason.WORKER_LOST, 5), (JobReason.PLATFORM_FAULT, 2)])
def test_f07_the_retry_budget_allows_exactly_as_many_attempts_as_the_rule(reason: JobReason, attempts: int) -> None:
    assert RULES[reason].retries == attempts
    job = JobView(JobState.RUNNING)
    waits = []
    for _ in range(attempts - 1):
        outcome = after_attempt(job, "train", reason, NOW)
        assert outcome.to is JobState.QUEUED
        assert outcome.not_before is not None
        waits.append((outcome.not_before - NOW).total_seconds())
        job = replace(job, faults=outcome.faults)
    assert waits == [1, 2, 4, 8][: attempts - 1]
    last = after_attempt(job, "train", reason, NOW)
    assert (last.to, last.reason) == (JobState.FAILED, JobReason.TOO_MANY_FAULTS)


def test_a_fault_while_preparing_keeps_the_job_validating() -> None:
    outcome = after_attempt(JobView(JobState.VALIDATING), "prepare", JobReason.WORKER_LOST, NOW)
    assert outcome.to is None
    backing_off = JobView(JobState.VALIDATING, not_before=outcome.not_before)
    assert decide(backing_off, None, now=NOW, pool="missing") == Decision()
    later = NOW + timedelta(seconds=2)
    assert decide(backing_off, None, now=later, pool="missing") == Decision(prepare=True)
    assert decide(backing_off, None, now=later, pool="unreachable") == Decision()


def test_preemption_goes_on_at_once_and_never_fails() -> None:
    job = JobView(JobState.RUNNING, faults={"preempted": 500})
    outcome = after_attempt(job, "train", JobReason.PREEMPTED, NOW)
    assert (outcome.to, outcome.not_before) == (JobState.QUEUED, None)


def test_an_attempt_that_faults_under_cancel_is_not_tried_again() -> None:
    job = JobView(JobState.RUNNING, Intent.CANCEL)
    assert after_attempt(job, "train", JobReason.PLATFORM_FAULT, NOW) == CANCELLED
    assert after_attempt(replace(job, state=JobState.VALIDATING), "prepare", JobReason.COMPLETED, NOW) == CANCELLED


def test_success_stands_even_when_a_cancel_came_late() -> None:
    job = JobView(JobState.RUNNING, Intent.CANCEL)
    assert after_attempt(job, "train", JobReason.COMPLETED, NOW).to is JobState.SUCCEEDED


def test_stopping_early_and_an_invalid_model_end_the_job() -> None:
    stopped = after_attempt(JobView(JobState.RUNNING, Intent.PAUSE), "train", JobReason.STOPPED_EARLY, NOW)
    assert (stopped.to, stopped.reason) == (JobState.SUCCEEDED, JobReason.STOPPED_EARLY)
    for state, kind in ((JobState.VALIDATING, "prepare"), (JobState.RUNNING, "train")):
        outcome = after_attempt(JobView(state), kind, JobReason.INVALID_MODEL, NOW)  # type: ignore[arg-type]
        assert (outcome.to, outcome.reason) == (JobState.FAILED, JobReason.INVALID_MODEL)


@pytest.mark.parametrize(
    ("state", "attempt", "due"),
    [
        # The preparation goes on, it costs nothing; then the job rests before it takes a slot.
        (JobState.VALIDATING, None, Decision(prepare=True)),
        (JobState.VALIDATING, PREPARING, Decision()),
        (JobState.VALIDATING, replace(PREPARING, running=False), Decision()),
        (JobState.QUEUED, None, Decision(outcome=PAUSED)),
        (JobState.STARTING, STARTING, Decision(end_attempt=JobReason.PAUSED_BY_CUSTOMER, outcome=PAUSED)),
        (JobState.RUNNING, LIVE, Decision()),  # it is told, publishes and finishes
        (JobState.PAUSED, None, Decision()),
    ],
)
def test_what_a_pause_does_in_every_state(state: JobState, attempt: AttemptView | None, due: Decision) -> None:
    assert decide(JobView(state, Intent.PAUSE, intent_at=NOW), attempt, now=NOW, pool="alive") == due


@pytest.mark.parametrize(
    ("state", "attempt", "due"),
    [
        (JobState.VALIDATING, PREPARING, Decision()),
        (JobState.QUEUED, None, Decision()),
        (JobState.STARTING, STARTING, Decision()),
        (JobState.RUNNING, LIVE, Decision()),
        (JobState.PAUSED, None, Decision(outcome=REQUEUED)),
    ],
)
def test_what_a_resume_does_in_every_state(state: JobState, attempt: AttemptView | None, due: Decision) -> None:
    assert decide(JobView(state, Intent.RUN, intent_at=NOW), attempt, now=NOW, pool="alive") == due


def test_a_paused_job_is_cancelled_at_once() -> None:
    job = JobView(JobState.PAUSED, Intent.CANCEL, intent_at=NOW)
    assert decide(job, None, now=NOW, pool="unreachable") == Decision(outcome=CANCELLED)


def test_a_pause_while_the_data_is_prepared_waits_for_the_end_of_the_preparation() -> None:
    job = JobView(JobState.VALIDATING, Intent.PAUSE)
    assert after_attempt(job, "prepare", JobReason.COMPLETED, NOW).to is JobState.QUEUED
    queued = decide(JobView(JobState.QUEUED, Intent.PAUSE), None, now=NOW, pool="alive")
    assert queued == Decision(outcome=PAUSED)
    told = after_attempt(job, "prepare", JobReason.PAUSED_BY_CUSTOMER, NOW)
    assert (told.to, told.faults) == (None, None), "a worker that obeys the pause is no fault"


@pytest.mark.parametrize(
    ("intent", "outcome"), [(Intent.PAUSE, PAUSED), (Intent.RUN, REQUEUED), (Intent.CANCEL, CANCELLED)]
)
def test_what_the_customer_wants_by_now_counts_when_a_worker_has_paused(intent: Intent, outcome: Outcome) -> None:
    job = JobView(JobState.RUNNING, intent, intent_at=NOW, faults={"worker_lost": 1})
    assert after_attempt(job, "train", JobReason.PAUSED_BY_CUSTOMER, NOW) == outcome


def test_a_worker_that_is_lost_while_it_pauses_leaves_a_paused_job() -> None:
    job = JobView(JobState.RUNNING, Intent.PAUSE, intent_at=NOW, faults={"worker_lost": 1})
    decision = decide(job, replace(LIVE, lease_expires_at=PAST), now=NOW, pool="alive")
    assert decision.end_attempt is JobReason.WORKER_LOST
    assert decision.outcome == replace(PAUSED, faults={"worker_lost": 2})
    late = replace(job, intent_at=NOW - timedelta(seconds=60))
    ended = Decision(end_attempt=JobReason.PAUSED_BY_CUSTOMER, outcome=PAUSED)
    assert decide(late, LIVE, now=NOW, pool="alive") == ended, "one that ignores the pause is stopped after its grace"


def test_a_preview_ends_with_its_preparation_and_never_waits_for_an_accelerator() -> None:
    preview = JobView(JobState.VALIDATING, ends_prepared=True)
    assert decide(preview, None, now=NOW, pool="alive") == Decision(prepare=True)
    done = after_attempt(preview, "prepare", JobReason.COMPLETED, NOW)
    assert (done.to, done.reason) == (JobState.SUCCEEDED, JobReason.COMPLETED)
    assert after_attempt(preview, "prepare", JobReason.INVALID_DATA, NOW).to is JobState.FAILED
    assert after_attempt(preview, "prepare", JobReason.WORKER_LOST, NOW).to is None
    for reason in RULES:
        for intent in Intent:
            target = after_attempt(replace(preview, intent=intent), "prepare", reason, NOW).to
            assert target is None or allowed("validating", target, ends_prepared=True), (reason, intent)
    for targets in PREPARED_TRANSITIONS.values():
        assert targets <= TERMINAL
    assert not allowed("validating", "succeeded")
    assert not allowed("succeeded", "queued", ends_prepared=True)


def test_every_outcome_is_an_allowed_move() -> None:
    sources: dict[AttemptKind, list[JobState]] = {
        "prepare": [JobState.VALIDATING],
        "train": [JobState.STARTING, JobState.RUNNING],
    }
    for kind, states in sources.items():
        for source in states:
            for reason in RULES:
                if RULES[reason].final == "succeeded" and source is JobState.STARTING:
                    continue  # nothing completes before its first call
                for intent in Intent:
                    outcome = after_attempt(JobView(source, intent), kind, reason, NOW)
                    assert outcome.to is None or allowed(source, outcome.to), (source, reason, intent)


def test_the_documented_table_is_the_code() -> None:
    page = (Path(__file__).parents[2] / "docs" / "job-states.md").read_text()
    rows = re.findall(r"^\| `(\w+)` \| ([^|]*) \|", page, flags=re.MULTILINE)
    moves = {source: set(re.findall(r"`(\w+)`", targets)) for source, targets in rows if source in set(JobState)}
    assert moves == {source.value: {target.value for target in targets} for source, targets in TRANSITIONS.items()}
    reasons = re.findall(r"^\| `(\w+)` \| (\S+) \| (\d+|–) \| (.*) \|$", page, flags=re.MULTILINE)
    documented = {name: (final, retries, sentence) for name, final, retries, sentence in reasons}
    assert documented == {
        reason.value: (rule.final or "–", str(rule.retries) if rule.retries else "–", rule.sentence)
        for reason, rule in RULES.items()
    }
