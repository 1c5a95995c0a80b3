"""Interrupted = uninterrupted for RL: rollouts, metrics, usage and every number of the last checkpoint."""

from __future__ import annotations

import hashlib
import os
import signal
import subprocess
import sys
import threading
from contextlib import suppress
from pathlib import Path
from typing import Any

import grpc
import pytest

from finery_gpu_workers import run
from finery_gpu_workers.methods.rl_report import CpuSeconds
from finery_protos.v1 import worker_pb2 as pb
from finery_testing.control_plane import FakeControlPlane

from .conftest import MakeJob, ended
from .rl_jobs import python_grader, rl_job
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


@pytest.mark.slow
def test_resume_is_exact_after_kill_9(make_job: MakeJob, uninterrupted: dict[str, Any], tmp_path: Path) -> None:
    """Real processes, started as `python -m finery_gpu_workers.run`."""
    control = rl_job(make_job, LOWER, **OPTIONS)
    run.main(control.attempt(PREPARE))
    worker: list[subprocess.Popen[bytes]] = []

    def kill(name: str, request: Any) -> grpc.StatusCode | None:
        if name == "CommitSteps" and request.steps[-1].step >= 3 and control.fence == 2:
            os.kill(worker[0].pid, signal.SIGKILL)
            return grpc.StatusCode.UNAVAILABLE
        return None

    control.hook = kill
    for expected in (-signal.SIGKILL, 0):
        environment = os.environ | control.attempt(TRAIN)
        command = [sys.executable, "-m", "finery_gpu_workers.run"]
        with (tmp_path / "worker.log").open("ab") as log:
            worker[:] = [subprocess.Popen(command, env=environment, stderr=log)]
        assert worker[0].wait(120) == expected, (tmp_path / "worker.log").read_text()
    assert outcome(control) == uninterrupted


def test_a_reward_process_that_is_killed_is_started_anew(make_job: MakeJob) -> None:
    """All of them, at the commit of step 2: what is being graded then may fail, and the job goes on."""
    control, killed = rl_job(make_job, python_grader("return len(set(text))"), steps=5, min_graded=0.1), set[int]()
    others = children()  # of the tests: their database, for one

    def kill(name: str, request: Any) -> None:
        if name == "CommitSteps" and request.steps[-1].step >= 2 and not killed:
            killed.update(children() - others)
            for pid in killed:
                os.kill(pid, signal.SIGKILL)

    control.hook = kill
    run.main(control.attempt(PREPARE))
    run.main(control.attempt(TRAIN))
    assert killed
    assert ended(control) == "completed"
    assert [step.step for step in control.steps] == [1, 2, 3, 4, 5]
    rows = [row for step in range(1, 6) for row in control.rollouts(step)]
    failed = [row for row in rows if row["failure"]]
    assert len(failed) <= 4
    assert not any(row["trained"] for row in failed)
    assert all(row["reward"] is not None for row in control.rollouts(5))


def children() -> set[int]:
    """Processes that this one started."""
    found = set()
    for status in Path("/proc").glob("[0-9]*/stat"):
        with suppress(OSError):
            if int(status.read_text().rpartition(")")[2].split()[1]) == os.getpid():
                found.add(int(status.parent.name))
    return found


def test_seconds_of_graders_are_billed_whole_and_the_rest_is_carried() -> None:
    cpu = CpuSeconds()
    assert [cpu.bill(seconds) for seconds in (0.6, 0.3, 0.2, 2.0, 0.0)] == [0, 0, 1, 2, 0]
    assert cpu.waiting == pytest.approx(0.1)
    assert CpuSeconds(cpu.waiting).bill(0.95) == 1
