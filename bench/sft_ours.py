"""Our side of sft_tokens: a fresh process for every run, prints one JSON object.

    python bench/sft_ours.py JOB.json

JOB.json: {"model": folder, "rows": path, "threads": n}: one epoch over all rows, 8 to an update as in TRL. With
{"documents": [{"tokens", "labels"}], "model", "threads"} instead of rows: their loss before training, per dtype.
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

from finery.types.methods import LoraAdapter, SftHyperparameters
from finery_gpu_workers.batch import pack
from finery_gpu_workers.data.packing import micro_batches
from finery_gpu_workers.learner import Learner
from finery_gpu_workers.models.load import load_model
from finery_gpu_workers.seeds import deterministic

ROWS_PER_UPDATE, MICRO_BATCH_TOKENS = 8, 2048  # the latter is what a worker takes on a CPU


def learner(job: dict[str, Any], dtype: torch.dtype) -> Learner:
    model = load_model(Path(job["model"]), device="cpu", dtype=dtype)
    return Learner.create(model, LoraAdapter(), SftHyperparameters(), seed=0)


def train(job: dict[str, Any]) -> dict[str, Any]:
    rows = json.loads(Path(job["rows"]).read_text())
    lengths = np.array([len(tokens) for tokens, _ in rows])
    one = learner(job, torch.bfloat16)
    cpu, wall, losses = time.process_time(), time.perf_counter(), []
    for start in range(0, len(rows), ROWS_PER_UPDATE):
        update = np.arange(start, min(start + ROWS_PER_UPDATE, len(rows)))
        denominator = sum(sum(rows[n][1][1:]) for n in update)
        micros = micro_batches(update, lengths, MICRO_BATCH_TOKENS)
        parts = [one.forward_backward(pack([rows[n] for n in micro]), denominator) for micro in micros]
        losses.append(sum(part.loss_sum for part in parts) / denominator)
        one.optim_step(2e-4)
    return {
        "tokens": int(lengths.sum()),
        "cpu": time.process_time() - cpu,
        "wall": time.perf_counter() - wall,
        "peak": resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024,
        "losses": losses,
        "trainable": one.trained.parameters,
        "gemm": gemm_rate(),
    }


def gemm_rate() -> float:
    """FLOP per CPU-second of the layers' greatest matmul in bf16, the best of 10."""
    x, weight = torch.randn(2048, 576).bfloat16(), torch.randn(3072, 576).bfloat16()
    seconds = []
    for _ in range(10):
        begun = time.process_time()
        torch.nn.functional.linear(x, weight)
        seconds.append(time.process_time() - begun)
    return 2 * 2048 * 576 * 3072 / min(seconds)


def losses(job: dict[str, Any]) -> dict[str, float]:
    """Mean over the scored tokens of the documents. A document's first token has nothing before it."""
    documents = [(d["tokens"], [float(label >= 0) for label in d["labels"]]) for d in job["documents"]]
    found = {}
    for dtype in (torch.float32, torch.bfloat16):
        one = learner(job, dtype)
        parts = [one.evaluate(pack([document])) for document in documents]
        found[str(dtype)] = sum(p.loss_sum for p in parts) / sum(p.tokens for p in parts)
    return found


def main() -> None:
    job = json.loads(Path(sys.argv[1]).read_text())
    deterministic(0, threads=job["threads"])  # as in a worker
    print(json.dumps(losses(job) if "documents" in job else train(job)))


if __name__ == "__main__":
    main()
