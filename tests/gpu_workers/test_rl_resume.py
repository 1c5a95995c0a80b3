"""Interrupted = uninterrupted for RL: rollouts, metrics, usage and every number of the last checkpoint."""

from __future__ import annotations

import hashlib
import threading
from typing import Any

import grpc
import pytest

from finery_gpu_workers import run
from finery_gpu_workers.methods.rl_report import CpuSeconds
from finery_protos.v1 import worker_pb2 as pb
from finery_testing.control_plane import FakeControlPlane

from .conftest import MakeJob, ended
from .rl_jobs import rl_job
from .test_resume import PREPARE, TRAIN, pause_at, train_until_it_holds

LOWER: dict[str, Any] = {"type": "text_similarity", "evaluation_metric": "fuzzy_match", "reference": "abcdefgh"}
OPTIONS: dict[str, Any] = {
    "steps": 5,
    "checkpoint_every": 2,
    "updates_per_step": 2,
    "kl_coefficient": 0.05,
    "dynamic_sampling": True,
    "eval_prompts": 2,
    "eval_samples": 2,
}


def outcome(control: FakeControlPlane) -> dict[str, Any]:
    """All that must not depend on interruptions."""
    last = control.checkpoints[-1]
    assert last.final
    files = {file.path: file.sha256 for file in last.files}
    for name in ("learner", "generators"):
        content = (control.store / last.resume_prefix / f"{name}.safetensors").read_bytes()
        files[name] = hashlib.sha256(content).hexdigest()
    steps = {step.step: step for step in control.steps}
    found: dict[str, Any] = {"files": files}
    for number, step in steps.items():
        timed = ("_seconds", "_per_second", "_bytes")
        found[f"metrics {number}"] = {name: v for name, v in step.metrics.items() if not name.endswith(timed)}
        found[f"usage {number}"] = {one.sku: one.quantity for one in step.usage}
        found[f"evaluation {number}"] = dict(step.evaluation.metrics)
        for evaluation in (False, True):
            if step.HasField("evaluation_rollouts" if evaluation else "rollouts"):
                rows = control.rollouts(number, evaluation=evaluation)
                found[f"rollouts {number} {evaluation}"] = [row | {"seconds": None} for row in rows]
    return found


@pytest.fixture(scope="module")
def kept() -> dict[str, Any]:
    return {}


@pytest.fixture
def uninterrupted(make_job: MakeJob, kept: dict[str, Any]) -> dict[str, Any]:
    if not kept:
        control = rl_job(make_job, LOWER, **OPTIONS)
        assert train_until_it_holds(control) == 1
        kept.update(outcome(control))
        assert any(row["trained"] for row in kept["rollouts 1 False"])
    return kept


@pytest.mark.parametrize("victim", [1, pytest.param(3, marks=pytest.mark.slow), 4])
def test_resume_is_exact_wherever_the_worker_dies(
    make_job: MakeJob, uninterrupted: dict[str, Any], victim: int
) -> None:
    control, died = rl_job(make_job, LOWER, **OPTIONS), threading.Event()

    def lose(name: str, request: Any) -> grpc.StatusCode | None:
        """The commit of step `victim` never arrives: the attempt was replaced in the middle of the step."""
        if name == "CommitSteps" and not died.is_set() and request.steps[-1].step >= victim:
            died.set()
            return grpc.StatusCode.ABORTED
        return None

    control.hook = lose
    assert train_until_it_holds(control) == 2
    assert outcome(control) == uninterrupted


def test_resume_is_exact_after_a_pause_between_checkpoints(make_job: MakeJob, uninterrupted: dict[str, Any]) -> None:
    control = rl_job(make_job, LOWER, **OPTIONS)
    run.main(control.attempt(PREPARE))
    control.hook = pause_at(control, 3)
    run.main(control.attempt(TRAIN))
    assert ended(control) == "paused_by_customer"
    assert control.checkpoints[-1].HasField("validation_reward")  # a pause has its evaluation, too
    control.hook, control.intent = lambda _name, _request: None, pb.INTENT_RUN
    run.main(control.attempt(TRAIN))
    assert outcome(control) == uninterrupted


def test_no_step_is_billed_twice_and_no_rollout_trained_twice(make_job: MakeJob) -> None:
    """What counts of a step that was done twice is the later one; both are the same."""
    control, died = rl_job(make_job, LOWER, **OPTIONS), threading.Event()

    def lose(name: str, _request: Any) -> grpc.StatusCode | None:
        if name == "PublishCheckpoint" and not died.is_set():
            died.set()
            return grpc.StatusCode.ABORTED
        return None

    control.hook = lose
    assert train_until_it_holds(control) == 2
    twice = [step for step in control.steps if step.step == 1]
    assert len(twice) == 2
    first, second = ({used.sku: used.quantity for used in one.usage} for one in twice)
    assert first == second
    assert twice[0].rollouts.key != twice[1].rollouts.key


def test_seconds_of_graders_are_billed_whole_and_the_rest_is_carried() -> None:
    cpu = CpuSeconds()
    assert [cpu.bill(seconds) for seconds in (0.6, 0.3, 0.2, 2.0, 0.0)] == [0, 0, 1, 2, 0]
    assert cpu.waiting == pytest.approx(0.1)
    assert CpuSeconds(cpu.waiting).bill(0.95) == 1
