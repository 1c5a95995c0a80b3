"""Our side of generate_tokens: a fresh process for every run, prints one JSON object.

    python bench/generate_ours.py JOB.json

JOB.json: {"model", "prompts", "threads", "per_call", "samples", "new_tokens"}. With {"drawn": [{"prompt", "tokens"}]}
instead of prompts: the mean log-prob of those tokens in an uncached pass, per dtype.
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
from finery_gpu_workers.learner import Learner
from finery_gpu_workers.models.load import load_model
from finery_gpu_workers.rollout.engine import Engine
from finery_gpu_workers.rollout.types import Group, Sampling
from finery_gpu_workers.seeds import deterministic


def generate(job: dict[str, Any]) -> dict[str, Any]:
    prompts = json.loads(Path(job["prompts"]).read_text())
    model = load_model(Path(job["model"]), device="cpu", dtype=torch.bfloat16)
    samples, size = job["samples"], job["per_call"]
    groups = [Group(n, tuple(p), tuple(range(n * samples, (n + 1) * samples))) for n, p in enumerate(prompts)]
    engine = Engine(model, text_of=str, max_rows=size * samples)
    calls = [groups[start : start + size] for start in range(0, len(groups), size)]
    list(engine.generate(calls[0], Sampling(max_new_tokens=4), 0))
    before = engine.spent.generated
    cpu, wall = time.process_time(), time.perf_counter()
    found = [list(engine.generate(call, Sampling(max_new_tokens=job["new_tokens"]), 0)) for call in calls]
    cpu, wall = time.process_time() - cpu, time.perf_counter() - wall
    first = [{"prompt": prompts[one.group], "tokens": one.tokens} for one in found[0]]
    return {
        "tokens": engine.spent.generated - before,
        "cpu": cpu,
        "wall": wall,
        "peak": resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024,
        "first": first,
        "mean_log_prob": float(np.mean([value for one in found[0] for value in one.log_probs])),
    }


def scores(job: dict[str, Any]) -> dict[str, float]:
    rows = [
        ([*one["prompt"], *one["tokens"]], [0.0] * len(one["prompt"]) + [1.0] * len(one["tokens"]))
        for one in job["drawn"]
    ]
    found = {}
    for dtype in (torch.float32, torch.bfloat16):
        model = load_model(Path(job["model"]), device="cpu", dtype=dtype)
        learner = Learner.create(model, LoraAdapter(), SftHyperparameters(), seed=0)
        found[str(dtype)] = float(torch.cat([learner.log_probs(pack([row])) for row in rows]).mean())
    return found


if __name__ == "__main__":
    task = json.loads(Path(sys.argv[1]).read_text())
    deterministic(0, threads=task["threads"])  # as in a worker
    print(json.dumps(scores(task) if "drawn" in task else generate(task)))
