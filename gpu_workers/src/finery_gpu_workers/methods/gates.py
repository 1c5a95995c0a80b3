"""What must hold before a run may call itself a success, whatever its loss looks like. A failure is a fault of ours."""

from __future__ import annotations

import logging
from collections.abc import Iterable

import numpy as np

from finery.types.methods import Adapter, LoraAdapter
from finery_gpu_workers.data.packing import Plan
from finery_gpu_workers.data.prepared import PreparedSet
from finery_gpu_workers.learner import Learner
from finery_gpu_workers.methods.objective import Rows
from finery_gpu_workers.models.interface import Model
from finery_gpu_workers.models.targets import SAVED
from finery_gpu_workers.resume import Cursor

_log = logging.getLogger(__name__)

# Of a row's second token the first is the only key: attention is 1 whatever the query.
_ATTENTION_SCORES = ("q_proj", "k_proj", "q_norm", "k_norm", "qkv_proj")


def check_modules(model: Model, adapter: Adapter, trained: Iterable[str]) -> None:
    """What the learner trains is what was asked for, counted on the model."""
    if isinstance(adapter, LoraAdapter):
        layers = {name for projection in model.projections() for name in projection.names}
        everything = adapter.targets == "all-linear"
        wanted = layers if everything else {n for n in layers if n.rpartition(".")[2] in adapter.targets}
        wanted |= {SAVED[name].removesuffix(".weight") for name in adapter.modules_to_save}
    else:
        wanted = {name.rpartition(".")[0] for name, _ in model.named_weights()}
    if not wanted or (found := set(trained)) != wanted:
        differing = sorted(found ^ wanted)[:3] if wanted else "none at all"
        raise RuntimeError(f"trained modules: expected {len(wanted)}, found others: {differing}")


def check_counts(plan: Plan, rows: Rows, cursor: Cursor) -> None:
    """Rows (or pairs) and trained tokens up to the cursor's step are those that were planned."""
    ones = np.ones(len(rows), dtype=np.int64)
    if cursor.step == plan.total_steps:
        planned = plan.total(ones), plan.total(rows.trained)
    else:
        updates = [plan.update(step).rows for step in range(1, cursor.step + 1)]
        planned = sum(map(len, updates)), sum(int(rows.trained[update].sum()) for update in updates)
    if (cursor.rows, cursor.trained_tokens) != planned:
        found = cursor.rows, cursor.trained_tokens
        raise RuntimeError(f"rows and trained tokens of {cursor.step} steps: expected {planned}, found {found}")


def deepest_target(rows: PreparedSet) -> int:
    """The most tokens that a row has up to and with a target."""
    deepest = 0
    for shard in rows.shards:
        targets, offsets = np.flatnonzero(shard["mask"]), shard["offsets"]
        starts = offsets[np.searchsorted(offsets, targets, side="right") - 1]
        deepest = max(deepest, int((targets - starts).max(initial=-1)) + 1)
    return deepest


def check_gradients(
    learner: Learner, parameters: Iterable[str], untouched: Iterable[str], *, deepest: int, steps: int
) -> None:
    """Of all trained parameters, those that never got a gradient are `untouched`. `deepest`: see `deepest_target`."""
    if not (silent := without_gradient(parameters, untouched, deepest)):
        return
    what = f"{len(silent)} trained modules never got a gradient in {steps} steps, as {silent[:3]}"
    if len(silent) == len(learner.trained.modules) or learner.model.engine != "transformers":
        raise RuntimeError(what)
    _log.warning("%s: other architectures have parts that text does not reach", what)


def without_gradient(parameters: Iterable[str], untouched: Iterable[str], deepest: int) -> list[str]:
    """Modules of which no parameter ever got a gradient, though it should have.

    One of two low-rank matrices may have none after a single step: the other one began as zero. `deepest`: see
    `deepest_target`; what predicts the second token of a row has one key to attend to.
    """
    touched = {_module(name) for name in set(parameters) - set(untouched)}
    silent = sorted({_module(name) for name in untouched} - touched)
    return [name for name in silent if deepest > 2 or name.rpartition(".")[2] not in _ATTENTION_SCORES]


def _module(parameter: str) -> str:
    return parameter.rpartition(".")[0]
