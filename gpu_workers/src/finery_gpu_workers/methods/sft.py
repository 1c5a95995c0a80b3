"""Supervised fine-tuning: the loop of `passes.py` with the likelihood of every trained token.

loss        - sum over the trained tokens of log p(token | what is before it in its row) / trained tokens of the
            whole update (losses/cross_entropy.py)
evaluation  the same over the whole validation set
usage       train.sft, eval.sft: trained tokens
"""

from __future__ import annotations

from typing import Any

from finery.types.usage import Sku
from finery_gpu_workers.batch import PackedBatch, pack
from finery_gpu_workers.data.packing import Ints
from finery_gpu_workers.data.prepared import Prepared, PreparedSet
from finery_gpu_workers.methods import passes
from finery_gpu_workers.methods.objective import Sums, TimedLearner
from finery_gpu_workers.methods.opening import open_learner
from finery_gpu_workers.methods.prepare import load_prepared
from finery_gpu_workers.work import Ending, Work


def train(work: Work) -> Ending:
    """Runs the job to its end, to the customer's stop, or to a step that is not finite."""
    data = load_prepared(work)
    opened = open_learner(work, reference=False)
    timed = passes.timed_learner(work, opened.learner)
    return passes.train(work, data, opened, timed, Sft(data, timed))


class Sft:
    """The objective, on prepared rows."""

    train_sku, eval_sku = Sku.TRAIN_SFT, Sku.EVAL_SFT

    def __init__(self, data: Prepared, timed: TimedLearner) -> None:
        self.train, self.validation = data.train, data.validation
        self._timed = timed

    def forward_backward(self, chosen: Ints, update: Ints) -> Sums:
        batch, denominator = packed_batch(self.train, chosen), int(self.train.trained[update].sum())
        with self._timed.clock.in_learner():
            found = self._timed.learner.forward_backward(batch, denominator)
        return Sums(found.tokens, {"loss": found.loss_sum})

    def evaluate(self, chosen: Ints) -> Sums:
        assert self.validation is not None
        batch = packed_batch(self.validation, chosen)
        with self._timed.clock.in_learner():
            found = self._timed.learner.evaluate(batch)
        return Sums(found.tokens, {"loss": found.loss_sum})

    def means(self, sums: Sums) -> dict[str, float]:
        return {"loss": sums.values["loss"] / sums.tokens}

    def manifest(self) -> dict[str, Any]:
        return {}


def packed_batch(rows: PreparedSet, chosen: Ints) -> PackedBatch:
    parts = (rows.row(int(n)) for n in chosen)
    return pack([(part.tokens, part.mask) for part in parts])
