"""Early stopping: when a job ends before its last step, and with what."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import grpc
import pytest

from finery.types.methods import SftHyperparameters
from finery_gpu_workers import run
from finery_gpu_workers.learner import Learner
from finery_gpu_workers.scoring import LossSum
from finery_gpu_workers.stopping import Patience
from finery_protos.v1 import worker_pb2 as pb

from .conftest import MakeJob, chat_rows, ended, evaluations, last_manifest, trained

NAN, INF = float("nan"), float("inf")


def stop_at(losses: list[float], patience: int, min_delta: float = 0.0) -> int | None:
    """The first evaluation after which a job ends; the one before training is number 0."""
    hyper = SftHyperparameters(early_stopping_patience=patience)
    state = Patience()
    for number, loss in enumerate(losses):
        state = state.after(loss, min_delta)
        if state.is_over(hyper):
            return number
    return None


@pytest.mark.parametrize(
    ("losses", "patience", "min_delta", "expected"),
    [
        ([3, 2, 1], 1, 0.0, None),
        ([3, 3], 1, 0.0, 1),  # the evaluation before training is the first best
        ([3, 2, 2.5, 1, 2, 3], 2, 0.0, 5),  # a better one starts the count anew
        ([3, 2, 2.5, 1.5], 2, 0.0, None),
        ([3, 2.75, 2.5, 2.25], 1, 0.25, 1),  # 0.25 less is not more than 0.25 less
        ([3, 2.75, 2.5, 2.25], 2, 0.25, None),  # the best stays 3, of which 2.5 is 0.5 below
        ([3, 2.7, 2.4, 2.4, 2.3], 2, 0.25, 4),
        ([3, NAN, INF], 2, 0.0, 2),
        ([NAN, 3, 2], 2, 0.0, None),  # never best, so 3 is
        ([NAN, NAN, 3], 2, 0.0, 1),
    ],
)
def test_patience_by_hand(losses: list[float], patience: int, min_delta: float, expected: int | None) -> None:
    assert stop_at(losses, patience, min_delta) == expected


def test_nothing_stops_without_patience() -> None:
    state = Patience().after(1.0, 0.0).after(2.0, 0.0)
    assert state == Patience(best=1.0, worse=1)
    assert not state.is_over(SftHyperparameters())


def scripted(monkeypatch: pytest.MonkeyPatch, losses: list[float]) -> Iterator[float]:
    """Evaluations find these mean losses, one after the other."""
    script = iter(losses)

    def evaluate(_self: Learner, batch: Any) -> LossSum:
        return LossSum(next(script) * batch.scored, batch.scored)

    monkeypatch.setattr(Learner, "evaluate", evaluate)
    return script


STOPPING: dict[str, Any] = {"epochs": 5, "checkpoint_every": 3, "eval_every": 1, "early_stopping_patience": 2}


def test_a_job_that_stops_early_succeeds_with_a_final_checkpoint(
    make_job: MakeJob, monkeypatch: pytest.MonkeyPatch
) -> None:
    scripted(monkeypatch, [4.0, 3.0, 2.0, 2.5, 2.25])
    control = trained(make_job(validation=chat_rows(2), **STOPPING))
    assert ended(control) == "stopped_early"
    assert control.step == 4
    assert evaluations(control) == {0: 4.0, 1: 3.0, 2: 2.0, 3: 2.5, 4: 2.25}
    assert [(c.step, c.final, c.validation_loss) for c in control.checkpoints] == [(3, False, 2.5), (4, True, 2.25)]
    content = last_manifest(control)
    assert content["final"] is True
    assert content["step"] == 4 < content["total_steps"]
    sold = sum(u.quantity for s in control.steps for u in s.usage if u.sku == "train.sft")
    assert content["trained_tokens"] == sold


def test_patience_that_ends_at_the_last_step_is_a_completed_job(
    make_job: MakeJob, monkeypatch: pytest.MonkeyPatch
) -> None:
    scripted(monkeypatch, [4.0, 3.0, 3.5, 3.25])
    control = trained(make_job(validation=chat_rows(2), **{**STOPPING, "max_steps": 3}))
    assert ended(control) == "completed"


def test_an_attempt_after_an_early_stop_only_finishes(make_job: MakeJob, monkeypatch: pytest.MonkeyPatch) -> None:
    """The worker was lost between its final checkpoint and its last call."""
    scripted(monkeypatch, [4.0, 3.0, 3.5, 3.5])
    control = make_job(validation=chat_rows(2), **STOPPING)
    run.main(control.attempt(pb.ATTEMPT_KIND_PREPARE))
    control.hook = lambda name, _request: grpc.StatusCode.ABORTED if name == "Finish" else None
    run.main(control.attempt(pb.ATTEMPT_KIND_TRAIN))
    assert control.finished is None
    assert control.checkpoints[-1].final
    control.hook = lambda _name, _request: None
    run.main(control.attempt(pb.ATTEMPT_KIND_TRAIN))
    assert ended(control) == "stopped_early"
    assert [step.step for step in control.steps] == [0, 1, 2, 3]


def test_patience_survives_a_lost_worker(make_job: MakeJob, monkeypatch: pytest.MonkeyPatch) -> None:
    """Two worse evaluations before the loss of the worker and one after make three."""
    losses = [4.0, 3.0, 3.5, 3.5]
    control = make_job(validation=chat_rows(2), **{**STOPPING, "early_stopping_patience": 3})
    run.main(control.attempt(pb.ATTEMPT_KIND_PREPARE))
    control.hook = lambda name, request: (
        grpc.StatusCode.ABORTED if name == "CommitSteps" and request.steps[-1].step >= 4 else None
    )
    scripted(monkeypatch, [*losses, 3.25, 3.25])
    run.main(control.attempt(pb.ATTEMPT_KIND_TRAIN))
    assert (control.finished, control.checkpoints[-1].step) == (None, 3)
    control.hook = lambda _name, _request: None
    scripted(monkeypatch, [3.25])
    run.main(control.attempt(pb.ATTEMPT_KIND_TRAIN))
    assert ended(control) == "stopped_early"
    assert control.step == 4


def test_the_evaluation_of_a_pause_does_not_count(make_job: MakeJob, monkeypatch: pytest.MonkeyPatch) -> None:
    """A job that was never paused would not have had it."""
    hyper = {"epochs": 8, "eval_every": 4, "checkpoint_every": 1000, "early_stopping_patience": 2}
    control = make_job(validation=chat_rows(2), **hyper)
    run.main(control.attempt(pb.ATTEMPT_KIND_PREPARE))
    control.grant_steps = 1

    def pause(name: str, request: Any) -> None:
        if name == "CommitSteps" and request.steps[-1].step >= 5:
            control.intent = pb.INTENT_PAUSE

    control.hook = pause
    scripted(monkeypatch, [4.0, 3.0, 9.0])
    run.main(control.attempt(pb.ATTEMPT_KIND_TRAIN))
    assert ended(control) == "paused_by_customer"
    assert (control.checkpoints[-1].validation_loss, control.checkpoints[-1].step in (5, 6, 7)) == (9.0, True)
    control.hook, control.intent = lambda _name, _request: None, pb.INTENT_RUN
    scripted(monkeypatch, [3.5, 3.5])
    run.main(control.attempt(pb.ATTEMPT_KIND_TRAIN))
    assert ended(control) == "stopped_early"
    assert control.step == 12
    assert evaluations(control) == {0: 4.0, 4: 3.0, 8: 3.5, 12: 3.5}


@pytest.mark.parametrize(("losses", "step"), [([NAN], 0), ([4.0, 3.0, NAN], 2), ([4.0, INF], 1)])
def test_an_evaluation_that_is_not_finite_ends_the_job_and_keeps_nothing_of_its_step(
    make_job: MakeJob, monkeypatch: pytest.MonkeyPatch, losses: list[float], step: int
) -> None:
    scripted(monkeypatch, losses)
    control = trained(make_job(validation=chat_rows(2), epochs=2, eval_every=1, checkpoint_every=1))
    assert ended(control) == "non_finite_loss"
    assert [s.step for s in control.steps] == list(range(step + 1))
    assert [c.step for c in control.checkpoints] == list(range(1, step))
    assert control.finished is not None
    assert control.finished.error is not None
    assert control.finished.error.message.startswith(f"Step {step}: expected a finite validation loss, found ")
    assert control.finished.error.param == ("model" if step == 0 else "hyperparameters.learning_rate")
