"""Interrupted = uninterrupted, bit for bit, wherever the worker dies."""

from __future__ import annotations

import hashlib
import json
import os
import signal
import subprocess
import sys
import threading
from pathlib import Path
from typing import Any

import grpc
import pytest

from finery_gpu_workers import run
from finery_protos.v1 import worker_pb2 as pb
from finery_testing.control_plane import FakeControlPlane, Hook
from finery_testing.tiny import make_tiny_model

from .conftest import MakeJob, chat_rows

PREPARE, TRAIN = pb.ATTEMPT_KIND_PREPARE, pb.ATTEMPT_KIND_TRAIN
HYPER: dict[str, Any] = {"epochs": 3, "checkpoint_every": 3, "weight_decay": 0.1, "max_grad_norm": 0.5}


def outcome(control: FakeControlPlane) -> dict[str, Any]:
    """All that must not depend on interruptions: every file of the last checkpoint, learner state, metrics, usage."""
    last = control.checkpoints[-1]
    assert last.final
    files = {f"final/{file.path}": file.sha256 for file in last.files}
    for name in ("learner", "generators"):
        content = (control.store / last.resume_prefix / f"{name}.safetensors").read_bytes()
        files[name] = hashlib.sha256(content).hexdigest()
    timings = ("step_seconds", "learner_seconds", "tokens_per_second", "memory_bytes")
    metrics = {s.step: {name: s.metrics[name] for name in s.metrics if name not in timings} for s in control.steps}
    usage = {u.unit: u.quantity for step in control.steps for u in step.usage}
    evaluations = {s.step: s.evaluation.loss for s in control.steps if s.HasField("evaluation")}
    return {"files": files, "metrics": metrics, "usage": usage, "evaluations": evaluations}


def train_until_it_holds(control: FakeControlPlane) -> int:
    """Attempts until one finishes; how many."""
    run.main(control.attempt(PREPARE))
    for attempts in range(1, 100):
        run.main(control.attempt(TRAIN))
        if control.finished:
            assert control.finished.reason == "completed", control.finished
            return attempts
    raise AssertionError("it never ends")


@pytest.fixture
def uninterrupted(make_job: MakeJob) -> dict[str, Any]:
    control = make_job(validation=chat_rows(2), **HYPER)
    assert train_until_it_holds(control) == 1
    assert control.steps[-1].step > 8  # over epochs and checkpoints
    return outcome(control)


@pytest.mark.slow
def test_d01_resume_is_exact_wherever_the_worker_dies(make_job: MakeJob, uninterrupted: dict[str, Any]) -> None:
    total = max(uninterrupted["metrics"])
    for victim in range(1, total + 1):
        control = make_job(validation=chat_rows(2), **HYPER)
        died = threading.Event()

        def lose(name: str, request: Any, victim: int = victim, died: threading.Event = died) -> grpc.StatusCode | None:
            """The commit of step `victim` never arrives: the attempt was replaced."""
            if name == "CommitSteps" and not died.is_set() and request.steps[-1].step >= victim:
                died.set()
                return grpc.StatusCode.ABORTED
            return None

        control.hook = lose
        assert train_until_it_holds(control) == 2
        assert outcome(control) == uninterrupted


def test_resume_is_exact_after_a_death_between_upload_and_row(make_job: MakeJob, uninterrupted: dict[str, Any]) -> None:
    control = make_job(validation=chat_rows(2), **HYPER)
    deaths = iter([True, True, False, True])

    def lose(name: str, _request: Any) -> grpc.StatusCode | None:
        return grpc.StatusCode.ABORTED if name == "PublishCheckpoint" and next(deaths, False) else None

    control.hook = lose
    assert train_until_it_holds(control) == 4
    assert outcome(control) == uninterrupted


def pause_at(control: FakeControlPlane, step: int) -> Hook:
    def pause(name: str, request: Any) -> None:
        if name == "CommitSteps" and request.steps[-1].step >= step:
            control.intent = pb.INTENT_PAUSE

    return pause


def test_resume_is_exact_after_a_pause(make_job: MakeJob, uninterrupted: dict[str, Any]) -> None:
    control = make_job(validation=chat_rows(2), **HYPER)
    run.main(control.attempt(PREPARE))
    control.hook = pause_at(control, 4)
    run.main(control.attempt(TRAIN))
    assert control.finished is not None
    assert control.finished.reason == "paused_by_customer"
    control.hook, control.intent = lambda _name, _request: None, pb.INTENT_RUN
    run.main(control.attempt(TRAIN))
    assert outcome(control) == uninterrupted


def test_an_attempt_after_the_last_checkpoint_only_finishes(make_job: MakeJob) -> None:
    control = make_job(**HYPER)
    train_until_it_holds(control)
    steps = len(control.steps)
    run.main(control.attempt(TRAIN))
    assert control.finished is not None
    assert control.finished.reason == "completed"
    assert len(control.steps) == steps


@pytest.mark.parametrize("file", ["index.json", "learner.safetensors", "generators.safetensors"])
def test_a_changed_resume_bundle_is_refused(make_job: MakeJob, file: str) -> None:
    control = make_job(**HYPER)
    train_until_it_holds(control)
    control.checkpoints.pop()
    control.steps.clear()
    path = control.store / control.checkpoints[-1].resume_prefix / file
    content = bytearray(path.read_bytes())
    content[-2] ^= 1
    path.write_bytes(content)
    run.main(control.attempt(TRAIN))
    assert control.finished is not None
    assert control.finished.reason == "platform_fault"
    assert not control.steps


def interrupted(control: FakeControlPlane) -> None:
    """A first training attempt that dies behind its first checkpoint."""
    run.main(control.attempt(PREPARE))
    control.hook = lambda name, request: (
        grpc.StatusCode.ABORTED if name == "CommitSteps" and request.steps[-1].step >= 5 else None
    )
    run.main(control.attempt(TRAIN))
    assert control.finished is None
    assert [c.step for c in control.checkpoints] == [3]
    control.hook = lambda _name, _request: None


@pytest.mark.parametrize("switch", ["to float32", "to bf16"])
def test_a_run_goes_on_in_the_dtype_it_began_with_on_any_processor(
    make_job: MakeJob, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, switch: str
) -> None:
    """The processors of a pool differ: some multiply bf16 fast, some do not."""
    bf16 = make_tiny_model(tmp_path / "bf16", dtype="bfloat16")
    first, second = switch == "to float32", switch != "to float32"
    monkeypatch.setattr("finery_gpu_workers.models.load._multiplies_bf16_fast", lambda _: first)
    straight, control = (make_job(validation=chat_rows(2), model=bf16, **HYPER) for _ in range(2))
    train_until_it_holds(straight)
    interrupted(control)
    monkeypatch.setattr("finery_gpu_workers.models.load._multiplies_bf16_fast", lambda _: second)
    run.main(control.attempt(TRAIN))
    assert outcome(control) == outcome(straight)
    compute = json.loads(control.checkpoints[-1].manifest_json)["compute"]
    assert (compute["dtype"], compute["device"]) == ("bfloat16" if first else "float32", "cpu")


def test_a_run_does_not_go_on_with_other_base_weights(make_job: MakeJob, tmp_path: Path) -> None:
    """As when a hub's `main` moves on between two attempts on two machines."""
    base = make_tiny_model(tmp_path / "base")
    control = make_job(model=base, **HYPER)
    interrupted(control)
    make_tiny_model(base, seed=1)
    run.main(control.attempt(TRAIN))
    assert control.finished is not None
    assert control.finished.reason == "platform_fault"
    assert [step.step for step in control.steps if step.step > 4] == []


def test_the_checkpoint_of_a_pause_is_evaluated_and_that_is_not_billed(make_job: MakeJob) -> None:
    """Every checkpoint can be compared with the others; the evaluation is no event, since its step is committed."""
    control = make_job(validation=chat_rows(2), **{**HYPER, "checkpoint_every": 1000})
    run.main(control.attempt(PREPARE))
    control.hook = pause_at(control, 4)
    run.main(control.attempt(TRAIN))
    (paused,) = control.checkpoints
    content = json.loads(paused.manifest_json)
    assert 0 < paused.step < content["total_steps"]
    assert content["evaluation"] == {"step": paused.step, "loss": paused.validation_loss, "tokens": 4}
    assert [u.unit for s in control.steps for u in s.usage if u.sku == "eval.sft"] == ["eval:0"]
    straight = make_job(validation=chat_rows(2), **{**HYPER, "checkpoint_every": 1000, "eval_every": paused.step})
    train_until_it_holds(straight)
    evaluations = {s.step: s.evaluation.loss for s in straight.steps if s.HasField("evaluation")}
    assert paused.validation_loss == evaluations[paused.step]


def test_resume_is_exact_after_kill_9(make_job: MakeJob, uninterrupted: dict[str, Any], tmp_path: Path) -> None:
    """Real processes, started as `python -m finery_gpu_workers.run`."""
    control = make_job(validation=chat_rows(2), **HYPER)
    run.main(control.attempt(PREPARE))
    worker: list[subprocess.Popen[bytes]] = []

    def kill(name: str, request: Any) -> grpc.StatusCode | None:
        if name == "CommitSteps" and request.steps[-1].step >= 5 and control.fence == 2:
            os.kill(worker[0].pid, signal.SIGKILL)
            return grpc.StatusCode.UNAVAILABLE
        return None

    control.hook = kill
    for expected in (-signal.SIGKILL, 0):
        environment = os.environ | control.attempt(TRAIN)
        command = [sys.executable, "-m", "finery_gpu_workers.run"]
        with (tmp_path / "worker.log").open("ab") as log:
            worker[:] = [subprocess.Popen(command, env=environment, stderr=log)]
        assert worker[0].wait(60) == expected, (tmp_path / "worker.log").read_text()
    assert outcome(control) == uninterrupted
    assert "token-" not in (tmp_path / "worker.log").read_text()
