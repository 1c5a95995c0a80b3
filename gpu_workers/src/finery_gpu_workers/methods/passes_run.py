"""What the steps of a run over a file share: one update, one evaluation, one checkpoint taken."""

from __future__ import annotations

import math
from dataclasses import dataclass, field, replace
from typing import Any

import numpy as np

from finery.types.methods import Optimization
from finery_gpu_workers import checkpoints, resume
from finery_gpu_workers.checkpoints import Facts, Staged
from finery_gpu_workers.data.packing import Plan
from finery_gpu_workers.data.prepared import Prepared
from finery_gpu_workers.methods import gates
from finery_gpu_workers.methods.objective import Objective, Sums, TimedLearner
from finery_gpu_workers.metrics import StepMetrics, memory_bytes
from finery_gpu_workers.models.interface import Model
from finery_gpu_workers.resume import Cursor, Known
from finery_gpu_workers.schedules import learning_rate
from finery_gpu_workers.start import Start
from finery_gpu_workers.work import Work


@dataclass(frozen=True)
class Result:
    """Of one update."""

    cursor: Cursor
    means: dict[str, float]
    """The objective's, of the whole update."""
    trained_tokens: int
    tokens: int
    grad_norm: float
    finite: bool

    @property
    def loss(self) -> float:
        return self.means["loss"]


@dataclass(frozen=True)
class Evaluation:
    """Of the whole validation set, after a step."""

    step: int
    loss: float
    """The objective's, of the whole set."""
    tokens: int
    metrics: dict[str, float] = field(default_factory=dict)
    """Its other means."""

    @property
    def finite(self) -> bool:
        return math.isfinite(self.loss)

    def as_dict(self) -> dict[str, Any]:
        numbers = {"loss": self.loss, **self.metrics}
        finite = {name: value if math.isfinite(value) else None for name, value in numbers.items()}
        return {"step": self.step, **finite, "tokens": self.tokens}


@dataclass
class Run:
    work: Work
    data: Prepared
    plan: Plan
    start: Start
    model: Model
    timed: TimedLearner
    objective: Objective
    common: dict[str, Any]
    """The manifest's part that all checkpoints share."""
    hyper: Optimization = field(init=False)
    parameters: tuple[str, ...] = field(init=False)
    """Names of all that is trained."""
    known: Known = field(init=False)

    def __post_init__(self) -> None:
        self.hyper, self.learner, self.clock = self.work.spec.hyperparameters, self.timed.learner, self.timed.clock
        self.parameters = tuple(self.learner.without_gradient())  # before the first step that is all
        self.known = Known(untouched=self.parameters)

    def is_over(self, cursor: Cursor) -> bool:
        """No step is left, or the validation loss has not fallen for too long."""
        return cursor.step == self.plan.total_steps or self.known.patience.is_over(self.hyper)

    def update(self, step: int, before: Cursor) -> Result:
        """One optimizer update."""
        rows, update, sums = self.objective.train, self.plan.update(step), Sums()
        for micro in self.timed.micro_batches(update.rows, rows):
            sums.add(self.objective.forward_backward(micro, update.rows))
        with self.clock.in_learner():
            stats = self.learner.optim_step(self.learning_rate(step))
        cursor = Cursor(
            step=step,
            epoch=update.epoch,
            position=update.position + len(update.rows),
            rows=before.rows + len(update.rows),
            trained_tokens=before.trained_tokens + sums.tokens,
        )
        means, tokens = self.objective.means(sums), int(rows.lengths[update.rows].sum())
        metrics = {"step": step, **means, "grad_norm": stats.grad_norm, "tokens": tokens}
        silent = set(self.learner.without_gradient())
        untouched = tuple(name for name in self.known.untouched if name in silent)
        self.known = replace(self.known, metrics=metrics, untouched=untouched)
        return Result(cursor, means, sums.tokens, tokens, stats.grad_norm, stats.finite)

    def learning_rate(self, step: int) -> float:
        hyper = self.hyper
        shape = hyper.schedule, hyper.warmup_ratio, hyper.decay_ratio
        return learning_rate(step, self.plan.total_steps, hyper.learning_rate, *shape)

    def evaluate(self, step: int) -> Evaluation:
        """The whole validation set; changes nothing."""
        rows, sums = self.objective.validation, Sums()
        assert rows is not None
        for micro in self.timed.micro_batches(np.arange(len(rows)), rows):
            sums.add(self.objective.evaluate(micro))
        if sums.tokens != rows.trained.sum():
            raise RuntimeError(f"evaluation: expected {rows.trained.sum()} tokens, found {sums.tokens}")
        means = self.objective.means(sums)
        return Evaluation(step, means.pop("loss"), sums.tokens, means)

    def remember(self, evaluation: Evaluation) -> None:
        patience = self.known.patience.after(evaluation.loss, self.hyper.early_stopping_min_delta)
        self.known = replace(self.known, evaluation=evaluation.as_dict(), patience=patience)

    def evaluation_due(self, step: int) -> bool:
        """Every checkpoint has one, so that all of them can be compared."""
        every = self.hyper.eval_every
        due = step in (0, self.plan.total_steps) or step % self.hyper.checkpoint_every == 0
        return self.objective.validation is not None and (due or (every is not None and step % every == 0))

    def checkpoint_due(self, cursor: Cursor) -> bool:
        return self.is_over(cursor) or cursor.step % self.hyper.checkpoint_every == 0

    def stage(self, cursor: Cursor) -> Staged:
        """The checkpoint of a step that is done, on disk."""
        final = self.is_over(cursor)
        if final:
            self.check(cursor)
        return self._stage(cursor, final, self.known.evaluation)

    def stage_stop(self, cursor: Cursor) -> Staged:
        """The same where the customer stops the run; its evaluation is not billed, and forgotten when it goes on."""
        evaluation = self.known.evaluation
        if self.objective.validation is not None and (evaluation or {}).get("step") != cursor.step:
            evaluation = self.evaluate(cursor.step).as_dict()
        return self._stage(cursor, False, evaluation)

    def _stage(self, cursor: Cursor, final: bool, evaluation: dict[str, Any] | None) -> Staged:
        taken = resume.snapshot(self.learner, cursor, self.known, self.common["compute"])
        facts = Facts(final, self.plan.total_steps, self.data.index["end_of_turn"], evaluation)
        return checkpoints.stage(self.work, self.learner, self.start, taken, facts, self.common)

    def metrics(self, step: int, result: Result) -> dict[str, float]:
        """Of the step that ends here; the next one starts."""
        step_seconds, learner_seconds = self.clock.restart()
        metrics = StepMetrics(
            loss=result.loss,
            trained_tokens=result.trained_tokens,
            tokens=result.tokens,
            learning_rate=self.learning_rate(step),
            grad_norm=result.grad_norm,
            step_seconds=step_seconds,
            learner_seconds=learner_seconds,
            memory_bytes=memory_bytes(self.work.device),
        )
        return metrics.as_dict() | result.means

    def check(self, cursor: Cursor) -> None:
        """A run that did not do what was planned is a fault, whatever its loss looks like."""
        gates.check_counts(self.plan, self.objective.train, cursor)
        if untouched := self.known.untouched:
            deepest = gates.deepest_target(self.data.train)
            gates.check_gradients(self.learner, self.parameters, untouched, deepest=deepest, steps=cursor.step)
