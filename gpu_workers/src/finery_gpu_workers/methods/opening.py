"""What every method begins with: the model, and the learner at the job's starting point, or where a resume puts it."""

from __future__ import annotations

import logging
from collections.abc import Callable
from dataclasses import asdict, dataclass
from typing import Any

import torch

from finery_gpu_workers import resume
from finery_gpu_workers.learner import Learner
from finery_gpu_workers.manifest import compute_of
from finery_gpu_workers.methods import gates
from finery_gpu_workers.models.interface import Model
from finery_gpu_workers.models.load import compute_dtype, load_model, stored_dtype
from finery_gpu_workers.resume import Bundle, Cursor
from finery_gpu_workers.start import Start, open_start, start_adapter
from finery_gpu_workers.work import Work

_log = logging.getLogger(__name__)


@dataclass(frozen=True)
class Opened:
    start: Start
    bundle: Bundle | None
    model: Model
    learner: Learner
    compute: dict[str, Any]
    """As in the manifest."""


def open_learner(work: Work, *, reference: bool) -> Opened:
    """`reference`: the learner keeps the starting point. A bundle is opened, but not yet restored.

    Raises WorkerError, storage.DigestError.
    """
    start = open_start(work)
    bundle = resume.open_bundle(work, start.sha256)
    model = _load(work, start, bundle)
    learner = Learner.create(model, work.spec.adapter, work.spec.hyperparameters, seed=work.spec.seed)
    gates.check_modules(model, work.spec.adapter, learner.trained.modules)
    if (bundle is None or reference) and (folder := start_adapter(work)) is not None:
        learner.load_adapter(folder)
    if reference:
        learner.keep_reference()
    return Opened(start, bundle, model, learner, compute_of(work, model, start.sha256))


def restore(work: Work, opened: Opened, place_after: Callable[[int], tuple[int, int]]) -> Cursor:
    """Puts the learner and the random number generators where the bundle was written, if there is one; where that is.

    `place_after`: the plan's epoch and position after a step. Raises RuntimeError where the bundle's are others.
    """
    bundle = opened.bundle
    if bundle is None:
        return Cursor()
    resume.restore(work, bundle, opened.learner)
    if opened.compute != bundle.compute:
        _log.warning("goes on with %s after %s: not the same bit for bit", opened.compute, bundle.compute)
    cursor, step = bundle.cursor, work.assignment.resume.step
    expected = step, *place_after(step)
    if (cursor.step, cursor.epoch, cursor.position) != expected:
        raise RuntimeError(f"resume: expected step, epoch, position {expected}, found {asdict(cursor)}")
    return cursor


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
