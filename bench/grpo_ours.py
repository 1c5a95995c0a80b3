"""Our side of grpo_step: a fresh process for every run, prints one JSON object.

    python bench/grpo_ours.py JOB.json

JOB.json: {"model", "rows", "threads", "micro_batch_tokens"}: sample, reward, train, update; 4 prompts × 8 answers to a
step. With {"first": what TRL's first step trained} instead of rows: the norm of the gradient of our loss on it, before
training.
"""

from __future__ import annotations

import json
import resource
import sys
import time
from collections.abc import Iterator
from dataclasses import dataclass
from functools import partial
from itertools import groupby
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


def learner(job: dict[str, Any], dtype: torch.dtype) -> Learner:
    model = load_model(Path(job["model"]), device="cpu", dtype=dtype)
    return Learner.create(model, LoraAdapter(), HYPER, seed=0)


@dataclass(frozen=True)
class Answer:
    prompt: list[int]
    tokens: list[int]
    advantage: float
    sampled: list[float] | None
    """Log-probs of the sampler; None: no importance weights."""


def micro_batches(answers: list[Answer], limit: int) -> Iterator[list[Answer]]:
    """Runs of up to `limit` tokens, in order; a prompt counts once for neighbours, as in a worker."""
    run: list[Answer] = []
    for one in answers:
        run.append(one)
        prompts = sum(len(group[0].prompt) for group in _groups(run))
        if len(run) > 1 and prompts + sum(len(answer.tokens) + 1 for answer in run) > limit:
            yield run[:-1]
            run = [one]
    yield run


def _groups(answers: list[Answer]) -> list[list[Answer]]:
    return [list(members) for _, members in groupby(answers, key=lambda one: one.prompt)]


def backward(one: Learner, answers: list[Answer], limit: int) -> None:
    """Adds the gradient of an update."""
    tokens = sum(len(answer.tokens) for answer in answers)
    for micro in micro_batches(answers, limit):
        shared = [[(answer.tokens, np.ones(len(answer.tokens))) for answer in group] for group in _groups(micro)]
        prompts = [group[0].prompt for group in _groups(micro)]
        batch = pack_shared([SharedRows(*group) for group in zip(prompts, shared, strict=True)])
        one.forward_backward_with(batch, partial(_loss, micro, tokens))


def _loss(micro: list[Answer], tokens: int, log_probs: Tensor) -> Tensor:
    lengths = [len(answer.tokens) for answer in micro]
    each = torch.tensor([answer.advantage for answer in micro]).repeat_interleave(torch.tensor(lengths))
    terms = policy_terms(log_probs, log_probs.detach(), each, lengths, clip_low=0.2, clip_high=0.2)
    sampled = [value for answer in micro for value in answer.sampled or ()]
    weights = importance_weights(log_probs, torch.tensor(sampled), 2.0) if sampled else 1.0
    return (terms.losses * weights).sum() / tokens


def step(
    one: Learner, engine: Engine, rows: list[dict[str, Any]], number: int, tokenizer: Tokenizer, limit: int
) -> float:
    groups = [
        Group(n, tuple(row["prompt_ids"]), tuple(range(SAMPLES * (100 * number + n), SAMPLES * (100 * number + n + 1))))
        for n, row in enumerate(rows)
    ]
    found: list[list[Completion]] = [[] for _ in rows]
    # No end tokens: equal work on both sides.
    for completion in engine.generate(groups, Sampling(max_new_tokens=NEW_TOKENS), one.version):
        found[completion.group].append(completion)
    rewards, answers = [], []
    for row, group in zip(rows, found, strict=True):
        rewards.append([reward(row["word"], tokenizer.decode(answer.tokens)) for answer in group])
        values = [value or 0.0 for value in advantages(rewards[-1], [0] * SAMPLES).values]
        for answer, value in zip(group, values, strict=True):
            answers.append(Answer(row["prompt_ids"], answer.tokens, value, answer.log_probs))
    backward(one, answers, limit)
    one.optim_step(HYPER.learning_rate)
    return float(np.mean(rewards))


def train(job: dict[str, Any]) -> dict[str, Any]:
    rows = json.loads(Path(job["rows"]).read_text())
    tokenizer = Tokenizer.from_file(str(Path(job["model"]) / "tokenizer.json"))
    one = learner(job, torch.bfloat16)
    engine = Engine(one.model, text_of=tokenizer.decode, max_rows=PROMPTS_PER_STEP * SAMPLES)
    cpu, wall = time.process_time(), time.perf_counter()
    steps = [rows[start : start + PROMPTS_PER_STEP] for start in range(0, len(rows), PROMPTS_PER_STEP)]
    rewards = [
        step(one, engine, prompts, number, tokenizer, job["micro_batch_tokens"]) for number, prompts in enumerate(steps)
    ]
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
    rows = zip(first["prompts"], first["answers"], first["advantages"], strict=True)
    answers = [Answer(prompt, tokens, value, None) for prompt, tokens, value in rows]
    for dtype in (torch.float32, torch.bfloat16):
        one = learner(job, dtype)
        backward(one, answers, 512)
        found[str(dtype)] = one.optim_step(0.0).grad_norm
    return found


if __name__ == "__main__":
    task = json.loads(Path(sys.argv[1]).read_text())
    deterministic(0, threads=task["threads"])  # as in a worker
    print(json.dumps(gradient_norm(task) if "first" in task else train(task)))
