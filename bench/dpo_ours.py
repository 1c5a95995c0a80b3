"""Our side of dpo_pairs: a fresh process for every run, prints one JSON object.

    python bench/dpo_ours.py JOB.json

JOB.json: {"model", "rows", "threads"}: one epoch over all pairs, 8 to an update as in TRL, the reference's log-probs of
all of them first. Time holds both.
"""

from __future__ import annotations

import json
import resource
import sys
import time
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor

from finery.types.methods import DpoHyperparameters, LoraAdapter
from finery_gpu_workers.batch import PackedBatch, SharedRows, pack_shared
from finery_gpu_workers.data.packing import micro_batches
from finery_gpu_workers.learner import Learner
from finery_gpu_workers.losses.preference import Pairs, preference_loss
from finery_gpu_workers.models.load import load_model
from finery_gpu_workers.seeds import deterministic

PAIRS_PER_UPDATE = 8  # what TRL takes by default
HYPER = DpoHyperparameters()


def batch(rows: list[dict[str, Any]]) -> PackedBatch:
    answers = [[row["chosen_ids"], row["rejected_ids"]] for row in rows]
    shared = [[(ids, np.ones(len(ids))) for ids in both] for both in answers]
    return pack_shared([SharedRows(row["prompt_ids"], both) for row, both in zip(rows, shared, strict=True)])


def sums(log_probs: Tensor, counts: tuple[int, ...]) -> tuple[Tensor, Tensor]:
    """Of the chosen and of the rejected answers."""
    whole = torch.stack([part.sum() for part in log_probs.split(counts)])
    return whole[0::2], whole[1::2]


def update(learner: Learner, micros: list[tuple[PackedBatch, tuple[Tensor, Tensor]]], pairs: int) -> float:
    total = 0.0

    for micro, reference in micros:
        counts = torch.tensor(micro.scored_counts, dtype=torch.float32)

        def loss(
            log_probs: Tensor,
            micro: PackedBatch = micro,
            reference: tuple[Tensor, Tensor] = reference,
            counts: Tensor = counts,
        ) -> Tensor:
            nonlocal total
            both = Pairs(*sums(log_probs, micro.scored_counts), *reference, counts[0::2], counts[1::2])
            value = preference_loss(both, HYPER).losses.sum() / pairs
            total += float(value.detach())
            return value

        learner.forward_backward_with(micro, loss)
    learner.optim_step(HYPER.learning_rate)
    return total


def train(job: dict[str, Any]) -> dict[str, Any]:
    rows = json.loads(Path(job["rows"]).read_text())
    lengths = np.array([len(row["prompt_ids"]) + len(row["chosen_ids"]) + len(row["rejected_ids"]) for row in rows])
    model = load_model(Path(job["model"]), device="cpu", dtype=torch.bfloat16)
    learner = Learner.create(model, LoraAdapter(), HYPER, seed=0)
    cpu, wall = time.process_time(), time.perf_counter()
    steps = []
    for start in range(0, len(rows), PAIRS_PER_UPDATE):
        chosen = np.arange(start, min(start + PAIRS_PER_UPDATE, len(rows)))
        batches = [batch([rows[n] for n in micro]) for micro in micro_batches(chosen, lengths, 1024)]
        steps.append((len(chosen), [(one, sums(learner.log_probs(one), one.scored_counts)) for one in batches]))
    losses = [update(learner, micros, pairs) for pairs, micros in steps]
    means = [torch.cat([reference[side] for _, reference in steps[0][1]]).mean().item() for side in (0, 1)]
    return {
        "pairs": len(rows),
        "cpu": time.process_time() - cpu,
        "wall": time.perf_counter() - wall,
        "peak": resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024,
        "losses": losses,
        "chosen_logps": means[:1],
        "rejected_logps": means[1:],
        "trainable": learner.trained.parameters,
    }


if __name__ == "__main__":
    task = json.loads(Path(sys.argv[1]).read_text())
    deterministic(0, threads=task["threads"])  # as in a worker
    print(json.dumps(train(task)))
