"""The SFT loop with the real learner: what it reports, when it stops, what it trains on."""

from __future__ import annotations

import json
import time
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from safetensors.torch import load_file

from finery_gpu_workers import run, seeds
from finery_gpu_workers.data import prepared
from finery_gpu_workers.data.packing import Plan
from finery_gpu_workers.learner import Learner
from finery_gpu_workers.methods.sft import packed_batch
from finery_gpu_workers.models.load import load_model
from finery_gpu_workers.schedules import learning_rate
from finery_protos.v1 import worker_pb2 as pb
from finery_testing.control_plane import FakeControlPlane

from .conftest import MakeJob, chat_rows, ended, passes, trained

# Answers of 1 to 25 tokens, so that means over micro batches and over the update differ.
UNEVEN = [
    {"messages": [{"role": "user", "content": "Count."}, {"role": "assistant", "content": "1" * (4 * n)}]}
    for n in range(7)
]
PREPARE, TRAIN = pb.ATTEMPT_KIND_PREPARE, pb.ATTEMPT_KIND_TRAIN


def learner_of(control: FakeControlPlane, folder: Path) -> Learner:
    """A fresh one, as the job's."""
    model = load_model(folder, device="cpu", dtype=torch.float32)
    return Learner.create(model, control.spec.adapter, control.spec.hyperparameters, seed=0)


def data_of(control: FakeControlPlane) -> prepared.Prepared:
    assert control.prepared is not None
    return prepared.load(control.store / control.prepared.prepared_prefix)


def test_a_job_reports_every_step_and_learns(make_job: MakeJob) -> None:
    control = trained(make_job(validation=chat_rows(3), epochs=6, checkpoint_every=5, eval_every=4))
    assert control.prepared is not None
    total = control.prepared.total_steps
    assert ended(control) == "completed"
    assert [step.step for step in control.steps] == list(range(total + 1))
    assert total > 10
    assert [c.step for c in control.checkpoints] == [*range(5, total, 5), total]
    assert [c.final for c in control.checkpoints] == [False] * (len(control.checkpoints) - 1) + [True]
    evaluated = [step.step for step in control.steps if step.HasField("evaluation")]
    assert evaluated == sorted({0, *range(4, total, 4), *range(5, total, 5), total})
    losses_at = {step.step: step.evaluation.loss for step in control.steps}
    assert [c.validation_loss for c in control.checkpoints] == [losses_at[c.step] for c in control.checkpoints]
    losses = [step.evaluation.loss for step in control.steps if step.HasField("evaluation")]
    assert losses[-1] < 0.7 * losses[0]


def test_usage_of_every_step_is_its_scored_positions(make_job: MakeJob) -> None:
    control = trained(make_job(validation=chat_rows(3), epochs=2))
    data = data_of(control)
    plan = Plan(data.train.lengths, passes(control), 0)
    assert control.prepared is not None
    units = {usage.unit: (usage.sku, usage.quantity) for step in control.steps for usage in step.usage}
    for step in range(1, plan.total_steps + 1):
        expected = int(data.train.trained[plan.update(step).rows].sum())
        assert units.pop(f"step:{step}") == ("train.sft", expected)
        assert control.steps[step].metrics["trained_tokens"] == expected
    assert units == {"eval:0": ("eval.sft", 6), f"eval:{plan.total_steps}": ("eval.sft", 6)}
    sold = sum(u.quantity for s in control.steps for u in s.usage if u.sku == "train.sft")
    assert sold == control.prepared.total_trained_tokens


def test_metrics_of_a_step(make_job: MakeJob) -> None:
    control = trained(make_job(epochs=2))
    total = len(control.steps)
    for step in control.steps:
        metrics = step.metrics
        assert metrics.keys() == {
            "loss", "trained_tokens", "tokens", "learning_rate", "grad_norm", "tokens_per_second", "step_seconds",
            "learner_seconds", "memory_bytes",
        }  # fmt: skip
        assert 0 < metrics["learner_seconds"] < metrics["step_seconds"]
        assert metrics["learning_rate"] == learning_rate(step.step, total, 1e-2, "cosine", 0.03)
        assert metrics["grad_norm"] > 0


def test_the_first_loss_is_the_mean_over_the_tokens_of_the_update(make_job: MakeJob, tiny_folder: Path) -> None:
    """Against the bare learner on the whole update at once; the job takes it in micro batches."""
    control = trained(make_job(batch_tokens=256, micro_batch_tokens=64, max_steps=1))
    data = data_of(control)
    rows = Plan(data.train.lengths, passes(control), 0).update(1).rows
    assert len(rows) > 2
    learner = learner_of(control, tiny_folder)
    whole = learner.evaluate(packed_batch(data.train, rows))
    assert control.steps[0].metrics["loss"] == pytest.approx(whole.loss_sum / whole.tokens, rel=1e-5)
    assert whole.tokens == control.steps[0].metrics["trained_tokens"]


def test_the_loop_is_the_loop_written_down_here(make_job: MakeJob, tiny_folder: Path) -> None:
    """Every update at once, without micro batches: same gradients, same rates, so nearly the same weights."""
    control = trained(make_job(UNEVEN, epochs=4, batch_tokens=256, micro_batch_tokens=16, schedule="linear"))
    hyper, data = passes(control), data_of(control)
    plan = Plan(data.train.lengths, hyper, 0)
    learner = learner_of(control, tiny_folder)
    for step in range(1, plan.total_steps + 1):
        batch = packed_batch(data.train, plan.update(step).rows)
        loss = learner.forward_backward(batch, batch.scored)
        stats = learner.optim_step(learning_rate(step, plan.total_steps, 1e-2, "linear", hyper.warmup_ratio))
        metrics = control.steps[step - 1].metrics
        assert metrics["loss"] == pytest.approx(loss.loss_sum / loss.tokens, rel=1e-4)
        assert metrics["grad_norm"] == pytest.approx(stats.grad_norm, rel=1e-3)
    assert plan.total_steps == 8
    final = control.store / control.checkpoints[-1].resume_prefix / "learner.safetensors"
    for name, value in load_file(final).items():
        if name.startswith("master."):
            assert torch.allclose(value, learner.state()[name], atol=1e-3), name


def slow_commits(name: str, _request: Any) -> None:
    """So that a worker which does not wait for an acknowledgement is ahead of it."""
    if name == "CommitSteps":
        time.sleep(0.1)


def test_a_checkpoint_is_published_behind_its_steps(make_job: MakeJob) -> None:
    """The control plane refuses a checkpoint whose steps are not committed; `make_job` fails on a refusal."""
    control = make_job(epochs=3, checkpoint_every=2)
    control.hook = slow_commits
    assert ended(trained(control)) == "completed"
    assert len(control.checkpoints) > 3


@pytest.mark.parametrize(
    ("intent", "expected"),
    [(pb.INTENT_CANCEL, "cancelled_by_customer"), (pb.INTENT_PAUSE, "paused_by_customer")],
)
def test_a_stop_publishes_a_checkpoint_of_the_step_it_is_at(
    make_job: MakeJob, intent: pb.Intent.ValueType, expected: str
) -> None:
    control = make_job(epochs=20)
    run.main(control.attempt(PREPARE))
    order: list[str] = []

    def stop(name: str, request: Any) -> None:
        order.append(name)
        if name == "CommitSteps" and request.steps[-1].step >= 4:
            control.intent = intent

    control.hook = stop
    run.main(control.attempt(TRAIN))
    assert ended(control) == expected
    assert [c.step for c in control.checkpoints] == [control.step]
    assert 4 <= control.step <= 4 + control.grant_steps
    assert not control.checkpoints[0].final
    assert order[-2:] == ["PublishCheckpoint", "Finish"]


def test_a_stop_before_the_first_step_stores_nothing(make_job: MakeJob) -> None:
    control = make_job()
    run.main(control.attempt(PREPARE))
    control.intent = pb.INTENT_CANCEL
    run.main(control.attempt(TRAIN))
    assert ended(control) == "cancelled_by_customer"
    assert not control.checkpoints
    assert not control.steps


def test_a_step_that_is_not_finite_ends_the_job_and_publishes_nothing(
    make_job: MakeJob, monkeypatch: pytest.MonkeyPatch
) -> None:
    control = make_job(epochs=5, checkpoint_every=2)
    run.main(control.attempt(PREPARE))
    step = Learner.optim_step
    count = iter(range(1, 100))

    def broken(self: Learner, rate: float) -> Any:
        if next(count) == 4:
            self._parameters.gradients[0] = float("nan")  # as a bad batch would
        return step(self, rate)

    monkeypatch.setattr(Learner, "optim_step", broken)
    run.main(control.attempt(TRAIN))
    assert ended(control) == "non_finite_loss"
    assert control.finished is not None
    assert control.finished.error is not None
    assert control.finished.error.details == [{"step": 4}]
    assert control.finished.error.message.startswith("Step 4: expected a finite loss and gradient")
    assert [s.step for s in control.steps] == [1, 2, 3, 4]
    assert np.isnan(control.steps[-1].metrics["grad_norm"])
    assert [c.step for c in control.checkpoints] == [2]


def test_counts_that_are_not_as_planned_are_a_fault(make_job: MakeJob, monkeypatch: pytest.MonkeyPatch) -> None:
    """A loop that lost a row would still show a falling loss."""
    control = make_job(epochs=1)
    run.main(control.attempt(PREPARE))
    monkeypatch.setattr("finery_gpu_workers.methods.objective.micro_batches", lambda rows, lengths, limit: [rows[:1]])
    run.main(control.attempt(TRAIN))
    assert ended(control) == "platform_fault"


def test_data_of_another_tokenizer_is_refused(make_job: MakeJob) -> None:
    control = make_job()
    run.main(control.attempt(PREPARE))
    assert control.prepared is not None
    index = control.store / control.prepared.prepared_prefix / "index.json"
    content = json.loads(index.read_text())
    index.write_text(json.dumps(content | {"tokenizer_sha256": "0" * 64}))
    run.main(control.attempt(TRAIN))
    assert ended(control) == "platform_fault"
    assert not control.steps


def test_steps_wait_for_their_grant(make_job: MakeJob) -> None:
    """The control plane refuses steps that it has not granted."""
    control = make_job(epochs=3)
    control.grant_steps, control.hook = 1, slow_commits
    assert ended(trained(control)) == "completed"
    assert control.calls.count("CommitSteps") == len(control.steps)


def test_the_thread_count_is_the_environments(make_job: MakeJob) -> None:
    trained(make_job(epochs=1))
    assert torch.get_num_threads() == 1
    assert seeds.torch_threads({"FINERY_TORCH_THREADS": "1"}) == 1
