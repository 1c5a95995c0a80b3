"""Log-probs of the starting point for all pairs: computed once, before the first step, and stored for later attempts.

They are computed in the very batches that training and evaluation use later (those of the first epoch), so that before
the first step policy and reference agree on every token to the last bit, whatever the dtype.
"""

from __future__ import annotations

import logging
import shutil
import time
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from obstore.exceptions import NotFoundError
from safetensors.numpy import load_file, save_file
from torch import Tensor

from finery.types.jobs import Intent
from finery_gpu_workers import storage
from finery_gpu_workers.batch import PackedBatch, SharedRows, pack_shared
from finery_gpu_workers.data.packing import Ints, Plan
from finery_gpu_workers.data.preference import Pairs
from finery_gpu_workers.methods.objective import TimedLearner
from finery_gpu_workers.methods.opening import Opened
from finery_gpu_workers.work import Work

_log = logging.getLogger(__name__)
_FILE = "log-probs.safetensors"
_TOLD_EVERY = 20.0
"""Seconds."""


@dataclass(frozen=True)
class Reference:
    """One set's log-probs, chosen answer before rejected one, pair by pair."""

    values: NDArray[np.float32]
    """[sum of `trained`], NaN where none was computed: no update holds that pair"""
    offsets: NDArray[np.int64]
    """[pairs + 1]"""

    @classmethod
    def empty(cls, pairs: Pairs) -> Reference:
        offsets = np.concatenate([np.zeros(1, dtype=np.int64), np.cumsum(pairs.trained)])
        return cls(np.full(int(offsets[-1]), np.nan, dtype=np.float32), offsets)

    def of(self, chosen: Ints) -> Tensor:
        """float32 [scored], in the order of `packed_pairs`."""
        parts = [self.values[self.offsets[n] : self.offsets[n + 1]] for n in chosen]
        found = torch.from_numpy(np.concatenate(parts))
        if not bool(found.isfinite().all()):
            raise RuntimeError("reference: expected log-probs of these pairs, found none")
        return found

    def put(self, chosen: Ints, log_probs: Tensor) -> None:
        counts = np.diff(self.offsets)[chosen].tolist()
        for n, part in zip(chosen, log_probs.split(counts), strict=True):
            self.values[self.offsets[n] : self.offsets[n + 1]] = part.numpy()


@dataclass(frozen=True)
class Stored:
    """All sets', and where they lie in the store."""

    sets: dict[str, Reference]
    place: dict[str, str] = field(default_factory=dict)
    """Key prefix and sha256: what a resume bundle holds."""


def packed_pairs(pairs: Pairs, chosen: Ints) -> PackedBatch:
    """Every prompt once, its chosen answer, its rejected one."""
    groups = []
    for n in chosen:
        pair = pairs.pair(int(n))
        answers = [(pair.chosen, pair.chosen_mask), (pair.rejected, pair.rejected_mask)]
        groups.append(SharedRows(pair.prompt, answers))
    return pack_shared(groups)


def reference_of(work: Work, opened: Opened, timed: TimedLearner, sets: dict[str, Pairs], plan: Plan) -> Stored | None:
    """Read where an attempt before this one stored it, else computed and stored.

    None: the customer stopped the job meanwhile. Raises storage.DigestError where what is stored has changed.
    """
    place = opened.bundle.known.extra.get("reference") if opened.bundle else None
    if place is not None and (found := _read(work, place, sets)) is not None:
        return found
    computed = _compute(work, timed, sets, plan)
    return None if computed is None else _store(work, computed)


def _compute(work: Work, timed: TimedLearner, sets: dict[str, Pairs], plan: Plan) -> dict[str, Reference] | None:
    micros = [
        (name, micro)
        for name, pairs in sets.items()
        for rows in (_first_epoch(plan) if name == "train" else [np.arange(len(pairs))])
        for micro in timed.micro_batches(rows, pairs)
    ]
    total, done, told = sum(len(micro) for _, micro in micros), 0, time.monotonic()
    made = {name: Reference.empty(pairs) for name, pairs in sets.items()}
    with timed.learner.reference():
        for name, micro in micros:
            if work.control.intent is not Intent.RUN:
                return None
            made[name].put(micro, timed.learner.log_probs(packed_pairs(sets[name], micro)))
            done += len(micro)
            if (now := time.monotonic()) - told > _TOLD_EVERY or done == total:
                told = now
                _log.info("reference log-probs: %d of %d pairs", done, total)
    return made


def _first_epoch(plan: Plan) -> list[Ints]:
    """The updates that hold, each once, all pairs that the job will train on."""
    updates = []
    for step in range(1, plan.total_steps + 1):
        update = plan.update(step)
        if update.epoch:
            break
        updates.append(update.rows)
    return updates


def _store(work: Work, sets: dict[str, Reference]) -> Stored:
    folder, prefix = work.folder / "reference", f"{work.assignment.output_prefix}reference/"
    folder.mkdir(exist_ok=True)
    save_file({name: one.values for name, one in sets.items()}, folder / _FILE)
    (file,) = storage.upload_all(work.store, folder, prefix)
    shutil.rmtree(folder)
    return Stored(sets, {"prefix": prefix, "sha256": file.sha256})


def _read(work: Work, place: dict[str, Any], sets: dict[str, Pairs]) -> Stored | None:
    path = work.folder / "reference" / _FILE
    try:
        storage.download(work.store, place["prefix"] + _FILE, path, place["sha256"])
    except (FileNotFoundError, NotFoundError):
        _log.warning("reference log-probs are no longer stored under %s: computed again", place["prefix"])
        return None
    values = load_file(path)
    shutil.rmtree(path.parent)
    made = {name: Reference(values[name], Reference.empty(pairs).offsets) for name, pairs in sets.items()}
    for name, one in made.items():
        if len(one.values) != one.offsets[-1]:
            raise RuntimeError(f"reference of {name}: expected {one.offsets[-1]} log-probs, found {len(one.values)}")
    return Stored(made, {"prefix": place["prefix"], "sha256": place["sha256"]})
