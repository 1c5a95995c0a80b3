"""DPO: interrupted = uninterrupted, bit for bit, and the reference is computed once."""

from __future__ import annotations

import threading
from typing import Any

import grpc
import pytest

from finery_gpu_workers import run
from finery_gpu_workers.learner import Learner
from finery_protos.v1 import worker_pb2 as pb
from finery_testing.control_plane import FakeControlPlane, Hook

from .conftest import MakeJob, ended
from .test_dpo import pair_rows
from .test_resume import PREPARE, TRAIN, outcome, pause_at, train_until_it_holds

HYPER: dict[str, Any] = {"epochs": 2, "checkpoint_every": 2, "batch_tokens": 300, "max_grad_norm": 0.5}


def job(make_job: MakeJob, **others: Any) -> FakeControlPlane:
    return make_job(pair_rows(), method="dpo", validation=pair_rows(3), **HYPER | others)


@pytest.fixture
def uninterrupted(make_job: MakeJob) -> dict[str, Any]:
    control = job(make_job)
    assert train_until_it_holds(control) == 1
    assert control.steps[-1].step >= 5
    return outcome(control)


def dies_at(victim: int) -> Hook:
    died = threading.Event()

    def lose(name: str, request: Any) -> grpc.StatusCode | None:
        """The commit of step `victim` never arrives: the attempt was replaced."""
        if name == "CommitSteps" and not died.is_set() and request.steps[-1].step >= victim:
            died.set()
            return grpc.StatusCode.ABORTED
        return None

    return lose


@pytest.mark.parametrize("victim", [1, 3, 5])
def test_resume_is_exact_and_reads_the_reference(
    make_job: MakeJob, uninterrupted: dict[str, Any], victim: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    references: list[int] = []
    reference = Learner.reference

    def counting(self: Learner) -> Any:
        references.append(self.version)
        return reference(self)

    monkeypatch.setattr(Learner, "reference", counting)
    control = job(make_job)
    control.hook = dies_at(victim)
    assert train_until_it_holds(control) == 2
    assert outcome(control) == uninterrupted
    # Without a checkpoint, which names the place of the first attempt's, the second one begins anew.
    assert references == ([0, 0] if victim <= 2 else [0])


def test_resume_is_exact_after_a_pause(make_job: MakeJob, uninterrupted: dict[str, Any]) -> None:
    control = job(make_job)
    run.main(control.attempt(PREPARE))
    control.hook = pause_at(control, 3)
    run.main(control.attempt(TRAIN))
    assert ended(control) == "paused_by_customer"
    control.hook, control.intent = lambda _name, _request: None, pb.INTENT_RUN
    run.main(control.attempt(TRAIN))
    assert outcome(control) == uninterrupted


def test_a_reference_that_is_gone_is_computed_again_and_is_the_same(
    make_job: MakeJob, uninterrupted: dict[str, Any]
) -> None:
    control = job(make_job)
    lose = dies_at(4)

    def hook(name: str, request: Any) -> grpc.StatusCode | None:
        if (status := lose(name, request)) is not None:
            (stored,) = control.store.glob("**/reference/log-probs.safetensors")
            stored.unlink()
        return status

    control.hook = hook
    assert train_until_it_holds(control) == 2
    assert outcome(control) == uninterrupted


def test_a_reference_that_was_changed_is_refused(make_job: MakeJob) -> None:
    control = job(make_job)
    lose = dies_at(4)

    def hook(name: str, request: Any) -> grpc.StatusCode | None:
        if (status := lose(name, request)) is not None:
            (stored,) = control.store.glob("**/reference/log-probs.safetensors")
            content = bytearray(stored.read_bytes())
            content[-1] ^= 1
            stored.write_bytes(content)
        return status

    control.hook = hook
    with pytest.raises(AssertionError, match="platform_fault"):
        train_until_it_holds(control)


def test_a_loop_that_loses_pairs_is_a_fault(make_job: MakeJob, monkeypatch: pytest.MonkeyPatch) -> None:
    control = job(make_job, epochs=1)
    monkeypatch.setattr("finery_gpu_workers.methods.objective.micro_batches", lambda rows, lengths, limit: [rows[1:]])
    with pytest.raises(AssertionError, match="platform_fault"):
        train_until_it_holds(control)
