"""Our side of grpo_step: a fresh process for every run, prints one JSON object.

    python bench/grpo_ours.py JOB.json

JOB.json: {"model", "rows", "threads"}: sample, reward, train, update; 4 prompts × 8 answers to a step. With {"first":
what TRL's first step trained} instead of rows: the norm of the gradient of our loss on it, before training.
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
from grpo_task import NEW_TOKENS, PROMPTS_PER_STEP, SAMPLES, reward
from tokenizers import Tokenizer
from torch import Tensor

from finery.types.methods import LoraAdapter, RlHyperparameters
from finery_gpu_workers.batch import SharedRows, pack_shared
from finery_gpu_workers.learner import Learner
from finery_gpu_workers.losses.advantages import advantages
from finery_gpu_workers.losses.policy import importance_weights, policy_terms
from finery_gpu_workers.models.load import load_model
from finery_gpu_workers.rollout.engine import Engine
from finery_gpu_workers.rollout.types import Completion, Group, Sampling
from finery_gpu_workers.seeds import deterministic

HYPER = RlHyperparameters(max_grad_norm=1.0)
ANSWERS_AT_ONCE = 4  # of a pass, as with micro_batch_tokens 320; a worker takes 2048: faster by 5 %, and more memory


def learner(job: dict[str, Any], dtype: torch.dtype) -> Learner:
    model = load_model(Path(job["model"]), device="cpu", dtype=dtype)
    return Learner.create(model, LoraAdapter(), HYPER, seed=0)


def backward(
    one: Learner, prompt: list[int], answers: list[list[int]], values: list[float], sampled: Tensor | None, tokens: int
) -> None:
    """Adds the gradient of some answers to one prompt; `tokens` are those of the whole update."""
    batch = pack_shared([SharedRows(prompt, [(ids, np.ones(len(ids))) for ids in answers])])
    lengths = [len(ids) for ids in answers]
    each = torch.tensor(values).repeat_interleave(torch.tensor(lengths))

    def loss(log_probs: Tensor) -> Tensor:
        terms = policy_terms(log_probs, log_probs.detach(), each, lengths, clip_low=0.2, clip_high=0.2)
        weights = 1.0 if sampled is None else importance_weights(log_probs, sampled, 2.0)
        return (terms.losses * weights).sum() / tokens

    one.forward_backward_with(batch, loss)


def step(one: Learner, engine: Engine, rows: list[dict[str, Any]], number: int, tokenizer: Tokenizer) -> float:
    groups = [
        Group(n, tuple(row["prompt_ids"]), tuple(range(SAMPLES * (100 * number + n), SAMPLES * (100 * number + n + 1))))
        for n, row in enumerate(rows)
    ]
    found: list[list[Completion]] = [[] for _ in rows]
    # No end tokens: equal work on both sides.
    for completion in engine.generate(groups, Sampling(max_new_tokens=NEW_TOKENS), one.version):
        found[completion.group].append(completion)
    tokens = sum(len(answer.tokens) for group in found for answer in group)
    rewards = []
    for row, group in zip(rows, found, strict=True):
        rewards.append([reward(row["word"], tokenizer.decode(answer.tokens)) for answer in group])
        values = [value or 0.0 for value in advantages(rewards[-1], [0] * SAMPLES).values]
        for start in range(0, SAMPLES, ANSWERS_AT_ONCE):
            part = group[start : start + ANSWERS_AT_ONCE]
            sampled = torch.tensor([value for answer in part for value in answer.log_probs])
            ids = [answer.tokens for answer in part]
            backward(one, row["prompt_ids"], ids, values[start : start + len(part)], sampled, tokens)
    one.optim_step(HYPER.learning_rate)
    return float(np.mean(rewards))


def train(job: dict[str, Any]) -> dict[str, Any]:
    rows = json.loads(Path(job["rows"]).read_text())
    tokenizer = Tokenizer.from_file(str(Path(job["model"]) / "tokenizer.json"))
    one = learner(job, torch.bfloat16)
    engine = Engine(one.model, text_of=tokenizer.decode, max_rows=PROMPTS_PER_STEP * SAMPLES)
    cpu, wall = time.process_time(), time.perf_counter()
    steps = [rows[start : start + PROMPTS_PER_STEP] for start in range(0, len(rows), PROMPTS_PER_STEP)]
    rewards = [step(one, engine, prompts, number, tokenizer) for number, prompts in enumerate(steps)]
    return {
        "steps": len(steps),
        "cpu": time.process_time() - cpu,
        "wall": time.perf_counter() - wall,
        "peak": resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024,
        "rewards": rewards,
        "generated": engine.spent.generated,
        "trainable": one.trained.parameters,
    }


def gradient_norm(job: dict[str, Any]) -> dict[str, float]:
    """Per dtype."""
    first, found = job["first"], {}
    tokens = sum(map(len, first["answers"]))
    for dtype in (torch.float32, torch.bfloat16):
        one = learner(job, dtype)
        for start in range(0, len(first["answers"]), SAMPLES):
            part = slice(start, start + SAMPLES)
            answers = first["answers"][part]
            backward(one, first["prompts"][start], answers, first["advantages"][part], None, tokens)
        found[str(dtype)] = one.optim_step(0.0).grad_norm
    return found


if __name__ == "__main__":
    task = json.loads(Path(sys.argv[1]).read_text())
    deterministic(0, threads=task["threads"])  # as in a worker
    print(json.dumps(gradient_norm(task) if "first" in task else train(task)))
