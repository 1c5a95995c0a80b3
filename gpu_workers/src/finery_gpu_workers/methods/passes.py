"""The loop of the methods that pass over a file, SFT (sft.py) and DPO (dpo.py).

Top to bottom (`train`, `_steps`; one update, one evaluation and one checkpoint are in `passes_run.py`; what is summed,
and over what it is divided, is the method's `Objective`):

    data, plan          prepared rows; which rows each update holds (data/packing.py)
    base, learner       the model with the checkpoints below it (start.py); an adapter on it, or all weights
    cursor              fresh, or exactly where the last attempt's checkpoint was (resume.py)
    step 0              evaluate before training
    while not over      wait until the next step is granted; stop here if the customer cancelled or paused
        update          micro batches → forward_backward; denominators are those of the whole update → optim_step
        evaluate        every `eval_every` steps and at every checkpoint; when patience is over this step is the last
        stage           every `checkpoint_every` steps and after the last: write the checkpoint's files
        commit          metrics and usage, through the outbox
        publish         hash, upload, row: through the outbox too, so behind all of its steps
    gates               rows, trained tokens, modules, gradients must be what was planned (gates.py)

A loss or gradient that is not finite, in a step or in an evaluation, ends the job; nothing of that step is kept.
"""

from __future__ import annotations

from dataclasses import replace
from functools import partial
from typing import Any

from finery.types.errors import ErrorDetail
from finery.types.jobs import Intent
from finery.types.methods import Passes
from finery.types.reasons import JobReason
from finery_gpu_workers import checkpoints
from finery_gpu_workers.data.packing import Plan
from finery_gpu_workers.data.prepared import Prepared
from finery_gpu_workers.learner import Learner
from finery_gpu_workers.manifest import manifest_of
from finery_gpu_workers.methods.objective import Objective, Rows, TimedLearner
from finery_gpu_workers.methods.opening import Opened, restore
from finery_gpu_workers.methods.passes_run import Evaluation, Result, Run
from finery_gpu_workers.metrics import Clock
from finery_gpu_workers.outbox import Outbox
from finery_gpu_workers.resume import Cursor
from finery_gpu_workers.work import Ending, Work, stopped_by_customer
from finery_protos.v1 import worker_pb2 as pb

_MICRO_BATCH_TOKENS = {"cpu": 2048, "cuda": 16384}


def timed_learner(work: Work, learner: Learner) -> TimedLearner:
    tokens = work.spec.hyperparameters.micro_batch_tokens or _MICRO_BATCH_TOKENS[work.device]
    return TimedLearner(learner, Clock(), tokens)


def plan_of(work: Work, rows: Rows) -> Plan:
    hyper = work.spec.hyperparameters
    assert isinstance(hyper, Passes)
    return Plan(rows.lengths, hyper, work.spec.seed)


def train(
    work: Work,
    data: Prepared,
    opened: Opened,
    timed: TimedLearner,
    objective: Objective,
    extra: dict[str, Any] | None = None,
) -> Ending:
    """Runs the job to its end, to the customer's stop, or to a step that is not finite.

    `extra` goes into every resume bundle (`Known.extra`).
    """
    plan = plan_of(work, objective.train)
    parts = opened.start, data.index, opened.model, opened.learner, opened.compute
    common = manifest_of(work, *parts) | objective.manifest()
    run = Run(work, data, plan, opened.start, opened.model, timed, objective, common)
    cursor = _start(run, opened)
    run.known = replace(run.known, extra=extra or {})
    with Outbox(work.control) as outbox:
        return _steps(run, cursor, outbox)


def _steps(run: Run, cursor: Cursor, outbox: Outbox) -> Ending:
    """From the step behind the cursor to the last."""
    work, stored = run.work, cursor.step
    if cursor.step == 0 and run.evaluation_due(0):
        first = run.evaluate(0)
        run.remember(first)
        outbox.commit(_message(run, 0, evaluation=first))
        if not first.finite:
            return _not_finite(outbox, 0, None, first)
    run.clock.restart()
    while not run.is_over(cursor):
        step = cursor.step + 1
        if (intent := outbox.wait_for_grant(step)) is not Intent.RUN:
            if cursor.step > stored:
                outbox.then(partial(checkpoints.publish, work, run.stage_stop(cursor)))
            outbox.drain()
            return stopped_by_customer(intent)
        result = run.update(step, cursor)
        cursor = result.cursor
        evaluation = run.evaluate(step) if result.finite and run.evaluation_due(step) else None
        if evaluation:
            run.remember(evaluation)
        finite = evaluation.finite if evaluation else result.finite
        staged = run.stage(cursor) if finite and run.checkpoint_due(cursor) else None
        outbox.commit(_message(run, step, run.metrics(step, result), result.trained_tokens, evaluation))
        if not finite:
            return _not_finite(outbox, step, result, evaluation)
        if staged:
            outbox.then(partial(checkpoints.publish, work, staged))
            stored = step
    outbox.drain()
    run.check(cursor)
    return Ending(JobReason.COMPLETED if cursor.step == run.plan.total_steps else JobReason.STOPPED_EARLY)


def _start(run: Run, opened: Opened) -> Cursor:
    """Where the run goes on from; the learner is put there."""

    def place_after(step: int) -> tuple[int, int]:
        update = run.plan.update(step)
        return update.epoch, update.position + len(update.rows)

    if opened.bundle:
        run.known = opened.bundle.known
    return restore(run.work, opened, place_after)


def _message(
    run: Run,
    step: int,
    metrics: dict[str, float] | None = None,
    trained_tokens: int = 0,
    evaluation: Evaluation | None = None,
) -> pb.Step:
    message = pb.Step(step=step, metrics=metrics or {})
    if trained_tokens:
        message.usage.add(sku=run.objective.train_sku, unit=f"step:{step}", quantity=trained_tokens)
    if evaluation:
        message.evaluation.loss = evaluation.loss
        message.evaluation.tokens = evaluation.tokens
        message.evaluation.metrics.update(evaluation.metrics)
        message.usage.add(sku=run.objective.eval_sku, unit=f"eval:{step}", quantity=evaluation.tokens)
    return message


def _not_finite(outbox: Outbox, step: int, result: Result | None, evaluation: Evaluation | None) -> Ending:
    """The end of a job whose numbers cannot be used any more."""
    outbox.drain()
    param = "hyperparameters.learning_rate"
    if evaluation is None:
        assert result is not None
        found = f"expected a finite loss and gradient, found loss {result.loss} and gradient norm {result.grad_norm}"
    else:
        found = f"expected a finite validation loss, found {evaluation.loss}"
    advice = "Nothing of this step was kept; try a lower learning rate."
    if step == 0:
        advice, param = "No step was trained: it is the model that gives it on the validation file.", "model"
    error = ErrorDetail(
        message=f"Step {step}: {found}. {advice}",
        type="invalid_request_error",
        code="non_finite_loss",
        param=param,
        details=[{"step": step}],
    )
    return Ending(JobReason.NON_FINITE_LOSS, error)
