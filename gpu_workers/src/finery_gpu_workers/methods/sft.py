"""Supervised fine-tuning.

The loop, top to bottom (`train`, `_steps`):

    data, plan          prepared rows; which rows each update holds (data/packing.py)
    learner, cursor     fresh, or from a checkpoint, or exactly where the last attempt's checkpoint was
    step 0              evaluate before training
    for step            wait until it is granted; stop here if the customer cancelled or paused
        update          micro batches → forward_backward; denominator = trained tokens of the whole update → optim_step
        evaluate        every `eval_every` steps and after the last
        stage           every `checkpoint_every` steps and after the last: write the checkpoint's files
        commit          metrics and usage, through the outbox
        publish         hash, upload, row: through the outbox too, so behind all of its steps
    counts              rows, trained tokens, adapted modules, gradients must be what was planned
"""

from __future__ import annotations

import logging
import math
from dataclasses import asdict, dataclass, field
from functools import partial
from typing import Any

import numpy as np
import torch

from finery.types.errors import ErrorDetail
from finery.types.jobs import Intent
from finery.types.reasons import JobReason
from finery.types.usage import Sku
from finery_gpu_workers import checkpoints
from finery_gpu_workers.batch import PackedBatch
from finery_gpu_workers.checkpoints import Bundle, Cursor, Staged
from finery_gpu_workers.data.packing import Ints, Plan, micro_batches
from finery_gpu_workers.data.prepared import Prepared, PreparedSet
from finery_gpu_workers.learner import Learner, LossSum
from finery_gpu_workers.methods.prepare import load_prepared
from finery_gpu_workers.metrics import Clock, StepMetrics, memory_bytes
from finery_gpu_workers.models.catalog import weights_sha256
from finery_gpu_workers.report import Outbox
from finery_gpu_workers.schedules import learning_rate
from finery_gpu_workers.work import Ending, Work, stopped_by_customer
from finery_protos.v1 import worker_pb2 as pb

_log = logging.getLogger(__name__)

_MICRO_BATCH_TOKENS = {"cpu": 2048, "cuda": 16384}


def train(work: Work) -> Ending:
    """Runs the job to its end, to the customer's stop, or to a step that is not finite."""
    hyper, seed = work.spec.hyperparameters, work.spec.seed
    data = load_prepared(work)
    plan = Plan(data.train.lengths, hyper, seed)
    base = weights_sha256(work.model_folder)
    bundle = checkpoints.resume_bundle(work, base)
    dtype = bundle.dtype if bundle else None  # also on a machine that would choose another one
    learner = Learner.create(work.model_folder, work.spec.adapter, hyper, seed=seed, device=work.device, dtype=dtype)
    run = Run(work, data, plan, learner, checkpoints.compute_of(work, learner, base))
    cursor = _start(run, bundle)
    with Outbox(work.control) as outbox:
        return _steps(run, cursor, outbox)


def _steps(run: Run, cursor: Cursor, outbox: Outbox) -> Ending:
    """From the step behind the cursor to the last."""
    work, total_steps, stored = run.work, run.plan.total_steps, cursor.step
    if cursor.step == 0 and run.data.validation:
        outbox.commit(_message(0, evaluation=run.evaluate(0)))
    run.clock.restart()
    for step in range(cursor.step + 1, total_steps + 1):
        if (intent := outbox.wait_for_grant(step)) is not Intent.RUN:
            if cursor.step > stored:
                outbox.then(partial(checkpoints.publish, work, run.stage(cursor)))
            outbox.drain()
            return stopped_by_customer(intent)
        result = run.update(step, cursor)
        cursor = result.cursor
        evaluation = run.evaluate(step) if result.finite and run.evaluation_due(step) else None
        staged = run.stage(cursor) if result.finite and run.checkpoint_due(step) else None
        outbox.commit(_message(step, run.metrics(step, result), result.trained_tokens, evaluation))
        if not result.finite:
            outbox.drain()
            return _not_finite(step, result)
        if staged:
            outbox.then(partial(checkpoints.publish, work, staged))
            stored = step
    outbox.drain()
    run.check_counts(cursor)
    return Ending(JobReason.COMPLETED)


@dataclass(frozen=True)
class Result:
    """Of one update."""

    cursor: Cursor
    loss: float
    """Mean over the update's trained tokens."""
    trained_tokens: int
    tokens: int
    grad_norm: float
    finite: bool


@dataclass
class Run:
    """What the steps share."""

    work: Work
    data: Prepared
    plan: Plan
    learner: Learner
    compute: dict[str, Any]
    """On what the numbers depend besides data, seed, hyper-parameters."""
    clock: Clock = field(default_factory=Clock)
    facts: dict[str, Any] = field(default_factory=dict)
    """Latest metrics and evaluation, for the manifest of a checkpoint; kept when a run resumes."""
    steps: int = 0
    """Of this attempt."""
    greatest_gradient: float = 0.0

    @property
    def micro_batch_tokens(self) -> int:
        return self.work.spec.hyperparameters.micro_batch_tokens or _MICRO_BATCH_TOKENS[self.work.device]

    def update(self, step: int, before: Cursor) -> Result:
        """One optimizer update."""
        rows, update = self.data.train, self.plan.update(step)
        denominator = int(rows.trained[update.rows].sum())
        loss_sum, trained = 0.0, 0
        for micro in micro_batches(update.rows, rows.lengths, self.micro_batch_tokens):
            batch = packed_batch(rows, micro)
            with self.clock.in_learner():
                part = self.learner.forward_backward(batch, denominator)
            loss_sum, trained = loss_sum + part.loss_sum, trained + part.tokens
        with self.clock.in_learner():
            stats = self.learner.optim_step(self.learning_rate(step))
        self.steps += 1
        self.greatest_gradient = max(self.greatest_gradient, stats.grad_norm)
        cursor = Cursor(
            step=step,
            epoch=update.epoch,
            position=update.position + len(update.rows),
            rows=before.rows + len(update.rows),
            trained_tokens=before.trained_tokens + trained,
        )
        loss, tokens = loss_sum / denominator, int(rows.lengths[update.rows].sum())
        self.facts["metrics"] = {"step": step, "loss": loss, "grad_norm": stats.grad_norm, "tokens": tokens}
        return Result(cursor, loss, trained, tokens, stats.grad_norm, stats.finite)

    def learning_rate(self, step: int) -> float:
        hyper = self.work.spec.hyperparameters
        return learning_rate(step, self.plan.total_steps, hyper.learning_rate, hyper.schedule, hyper.warmup_ratio)

    def evaluate(self, step: int) -> LossSum:
        """The whole validation set."""
        rows = self.data.validation
        assert rows is not None
        loss_sum, tokens = 0.0, 0
        for micro in micro_batches(np.arange(len(rows)), rows.lengths, self.micro_batch_tokens):
            batch = packed_batch(rows, micro)
            with self.clock.in_learner():
                part = self.learner.evaluate(batch)
            loss_sum, tokens = loss_sum + part.loss_sum, tokens + part.tokens
        if tokens != rows.trained.sum():
            raise RuntimeError(f"evaluation: expected {rows.trained.sum()} tokens, found {tokens}")
        loss = loss_sum / tokens
        self.facts["evaluation"] = {"step": step, "loss": loss if math.isfinite(loss) else None, "tokens": tokens}
        return LossSum(loss_sum, tokens)

    def evaluation_due(self, step: int) -> bool:
        every = self.work.spec.hyperparameters.eval_every
        due = step == self.plan.total_steps or (every is not None and step % every == 0)
        return due and self.data.validation is not None

    def checkpoint_due(self, step: int) -> bool:
        return step == self.plan.total_steps or step % self.work.spec.hyperparameters.checkpoint_every == 0

    def stage(self, cursor: Cursor) -> Staged:
        """The checkpoint of a step that is done, on disk."""
        index = self.data.index
        facts = {
            "total_steps": self.plan.total_steps,
            "seed": self.work.spec.seed,
            "trained_tokens": cursor.trained_tokens,
            "data_digests": {name: entry["digest"] for name, entry in index["sets"].items()},
            "template_sha256": index["template_sha256"],
            "tokenizer_sha256": index["tokenizer_sha256"],
            "compute": self.compute,
        }
        return checkpoints.stage(
            self.work,
            self.learner,
            cursor,
            final=cursor.step == self.plan.total_steps,
            facts=facts,
            latest=self.facts,
            stop=index["end_of_turn"],
        )

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
        return metrics.as_dict()

    def check_counts(self, cursor: Cursor) -> None:
        """A run that did not do what was planned is a fault, whatever its loss looks like."""
        planned = Cursor(
            step=self.plan.total_steps,
            epoch=cursor.epoch,
            position=cursor.position,
            rows=self.plan.total(np.ones(len(self.data.train), dtype=np.int64)),
            trained_tokens=self.plan.total(self.data.train.trained),
        )
        if cursor != planned:
            raise RuntimeError(f"counts at the end: expected {planned}, found {cursor}")
        if self.steps and not self.greatest_gradient > 0:
            raise RuntimeError(f"expected a gradient in {self.steps} steps, found none: nothing was trained")


def packed_batch(rows: PreparedSet, chosen: Ints) -> PackedBatch:
    """Rows laid end to end. A target is the next token of the same row, so the last position of a row has none."""
    parts = [rows.row(int(n)) for n in chosen]
    tokens = torch.from_numpy(np.concatenate([part.tokens for part in parts]).astype(np.int64))
    mask = torch.from_numpy(np.concatenate([part.mask for part in parts]).astype(np.float32))
    lengths = tuple(len(part.tokens) for part in parts)
    starts = torch.tensor(lengths).cumsum(0) - torch.tensor(lengths)
    weights = mask.roll(-1)
    weights[starts - 1] = 0.0  # starts[0] - 1 is -1: the very last position
    return PackedBatch(
        tokens=tokens,
        positions=torch.cat([torch.arange(length) for length in lengths]),
        targets=tokens.roll(-1),
        weights=weights,
        lengths=lengths,
    )


def _start(run: Run, bundle: Bundle | None) -> Cursor:
    """Where the run goes on from; the learner is put there."""
    work = run.work
    if bundle:
        checkpoints.resume(work, bundle, run.learner)
        cursor, update = bundle.cursor, run.plan.update(bundle.cursor.step)
        expected = work.assignment.resume.step, update.epoch, update.position + len(update.rows)
        if (cursor.step, cursor.epoch, cursor.position) != expected:
            raise RuntimeError(f"resume: expected step, epoch, position {expected}, found {asdict(cursor)}")
        run.facts |= bundle.latest
        if run.compute != bundle.compute:
            _log.warning("goes on with %s after %s: not the same bit for bit", run.compute, bundle.compute)
        return cursor
    if work.assignment.start_prefix:
        checkpoints.start_from(work, run.learner)
    return Cursor()


def _message(
    step: int, metrics: dict[str, float] | None = None, trained_tokens: int = 0, evaluation: LossSum | None = None
) -> pb.Step:
    message = pb.Step(step=step, metrics=metrics or {})
    if trained_tokens:
        message.usage.add(sku=Sku.TRAIN_SFT, unit=f"step:{step}", quantity=trained_tokens)
    if evaluation:
        message.evaluation.loss = evaluation.loss_sum / evaluation.tokens
        message.evaluation.tokens = evaluation.tokens
        message.usage.add(sku=Sku.EVAL_SFT, unit=f"eval:{step}", quantity=evaluation.tokens)
    return message


def _not_finite(step: int, result: Result) -> Ending:
    message = (
        f"Step {step}: expected a finite loss and gradient, found loss {result.loss} and gradient norm "
        f"{result.grad_norm}. Nothing of this step was kept; try a lower learning rate."
    )
    error = ErrorDetail(
        message=message,
        type="invalid_request_error",
        code="non_finite_loss",
        param="hyperparameters.learning_rate",
        details=[{"step": step}],
    )
    return Ending(JobReason.NON_FINITE_LOSS, error)
