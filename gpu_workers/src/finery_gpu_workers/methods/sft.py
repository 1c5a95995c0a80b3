"""Supervised fine-tuning.

The loop, top to bottom (`train`, `_steps`; one update, one evaluation and one checkpoint are in `sft_run.py`):

    data, plan          prepared rows; which rows each update holds (data/packing.py)
    base, learner       the model with the checkpoints below it (start.py); an adapter on it, or all weights
    cursor              fresh, or exactly where the last attempt's checkpoint was (resume.py)
    step 0              evaluate before training
    while not over      wait until the next step is granted; stop here if the customer cancelled or paused
        update          micro batches → forward_backward; denominator = trained tokens of the whole update → optim_step
        evaluate        every `eval_every` steps and at every checkpoint; when patience is over this step is the last
        stage           every `checkpoint_every` steps and after the last: write the checkpoint's files
        commit          metrics and usage, through the outbox
        publish         hash, upload, row: through the outbox too, so behind all of its steps
    gates               rows, trained tokens, modules, gradients must be what was planned (gates.py)

A loss or gradient that is not finite, in a step or in an evaluation, ends the job; nothing of that step is kept.
"""

from __future__ import annotations

import logging
from dataclasses import asdict
from functools import partial

import torch

from finery.types.errors import ErrorDetail
from finery.types.jobs import Intent
from finery.types.reasons import JobReason
from finery.types.usage import Sku
from finery_gpu_workers import checkpoints, resume
from finery_gpu_workers.data.packing import Plan
from finery_gpu_workers.learner import Learner
from finery_gpu_workers.manifest import compute_of, manifest_of
from finery_gpu_workers.methods import gates
from finery_gpu_workers.methods.prepare import load_prepared
from finery_gpu_workers.methods.sft_run import Evaluation, Result, Run
from finery_gpu_workers.models.interface import Model
from finery_gpu_workers.models.load import compute_dtype, load_model, stored_dtype
from finery_gpu_workers.report import Outbox
from finery_gpu_workers.resume import Bundle, Cursor
from finery_gpu_workers.start import Start, open_start, start_adapter
from finery_gpu_workers.work import Ending, Work, stopped_by_customer
from finery_protos.v1 import worker_pb2 as pb

_log = logging.getLogger(__name__)


def train(work: Work) -> Ending:
    """Runs the job to its end, to the customer's stop, or to a step that is not finite."""
    data = load_prepared(work)
    plan = Plan(data.train.lengths, work.spec.hyperparameters, work.spec.seed)
    start = open_start(work)
    bundle = resume.open_bundle(work, start.sha256)
    model = _load(work, start, bundle)
    learner = Learner.create(model, work.spec.adapter, work.spec.hyperparameters, seed=work.spec.seed)
    gates.check_modules(model, work.spec.adapter, learner.trained.modules)
    compute = compute_of(work, model, start.sha256)
    run = Run(work, data, plan, start, model, learner, manifest_of(work, start, data.index, model, learner, compute))
    cursor = _start(run, bundle)
    with Outbox(work.control) as outbox:
        return _steps(run, cursor, outbox)


def _steps(run: Run, cursor: Cursor, outbox: Outbox) -> Ending:
    """From the step behind the cursor to the last."""
    work, stored = run.work, cursor.step
    if cursor.step == 0 and run.evaluation_due(0):
        first = run.evaluate(0)
        run.remember(first)
        outbox.commit(_message(0, evaluation=first))
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
        outbox.commit(_message(step, run.metrics(step, result), result.trained_tokens, evaluation))
        if not finite:
            return _not_finite(outbox, step, result, evaluation)
        if staged:
            outbox.then(partial(checkpoints.publish, work, staged))
            stored = step
    outbox.drain()
    run.check(cursor)
    return Ending(JobReason.COMPLETED if cursor.step == run.plan.total_steps else JobReason.STOPPED_EARLY)


def _load(work: Work, start: Start, bundle: Bundle | None) -> Model:
    """The base, with rows for added tokens; in the dtype that the run began with on any machine."""
    dtype = bundle.dtype if bundle else compute_dtype(stored_dtype(start.source), work.device)
    rows = start.vocabulary
    model = load_model(work.model_folder, start.parts, device=work.device, dtype=dtype, new_tokens=rows.new)
    if model.vocab != rows.rows:
        raise RuntimeError(f"rows of the embedding: expected {rows.rows}, found {model.vocab}")
    _start_rows(model, rows.reused)
    return model


@torch.no_grad()
def _start_rows(model: Model, ids: tuple[int, ...]) -> None:
    """Rows that were there but belonged to no token begin as new ones do: as the mean of all."""
    for matrix in model.token_matrices() if ids else ():
        matrix[list(ids)] = matrix.float().mean(dim=0).to(matrix.dtype)


def _start(run: Run, bundle: Bundle | None) -> Cursor:
    """Where the run goes on from; the learner is put there."""
    work, compute = run.work, run.common["compute"]
    if bundle:
        resume.restore(work, bundle, run.learner)
        cursor, update = bundle.cursor, run.plan.update(bundle.cursor.step)
        expected = work.assignment.resume.step, update.epoch, update.position + len(update.rows)
        if (cursor.step, cursor.epoch, cursor.position) != expected:
            raise RuntimeError(f"resume: expected step, epoch, position {expected}, found {asdict(cursor)}")
        run.known = bundle.known
        if compute != bundle.compute:
            _log.warning("goes on with %s after %s: not the same bit for bit", compute, bundle.compute)
        return cursor
    if (folder := start_adapter(work)) is not None:
        run.learner.load_adapter(folder)
    return Cursor()


def _message(
    step: int, metrics: dict[str, float] | None = None, trained_tokens: int = 0, evaluation: Evaluation | None = None
) -> pb.Step:
    message = pb.Step(step=step, metrics=metrics or {})
    if trained_tokens:
        message.usage.add(sku=Sku.TRAIN_SFT, unit=f"step:{step}", quantity=trained_tokens)
    if evaluation:
        message.evaluation.loss = evaluation.loss
        message.evaluation.tokens = evaluation.tokens
        message.usage.add(sku=Sku.EVAL_SFT, unit=f"eval:{step}", quantity=evaluation.tokens)
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
