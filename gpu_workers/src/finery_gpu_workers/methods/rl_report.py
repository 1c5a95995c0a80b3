"""What a step says of itself: metrics, usage, notices."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from finery.types.usage import Sku
from finery_gpu_workers.methods.rl_eval import Evaluation
from finery_gpu_workers.methods.rl_sample import Sampled
from finery_gpu_workers.methods.rl_sampling import Rollout
from finery_gpu_workers.methods.rl_terms import by_group, says_something
from finery_gpu_workers.methods.rl_update import Updated
from finery_protos.v1 import worker_pb2 as pb


@dataclass
class CpuSeconds:
    """Seconds of customers' code: whole ones of the running sum are billed, the rest waits for more."""

    waiting: float = 0.0

    def bill(self, seconds: float) -> int:
        self.waiting += seconds
        whole = math.floor(self.waiting)
        self.waiting -= whole
        return whole


def step_usage(rollouts: Sequence[Rollout], cpu: CpuSeconds) -> Counter[Sku]:
    """Of training. Rollouts without a reward are neither billed as generated, nor are they why a prompt was read."""
    used: Counter[Sku] = Counter()
    for group in by_group(rollouts):
        billed = [one for one in group if one.reward is not None]
        prompt = len(group[0].prompt.tokens)
        used[Sku.ROLLOUT_PREFILL] += prompt if billed else 0
        used[Sku.ROLLOUT_PREFILL_CACHED] += prompt * max(0, len(billed) - 1)
        used[Sku.ROLLOUT_GENERATED] += sum(len(one.tokens) for one in billed)
        used[Sku.TRAIN_RL] += sum(len(one.tokens) for one in group if one.trained)
    return used + _graders(rollouts, cpu)


def evaluation_usage(evaluation: Evaluation, cpu: CpuSeconds) -> Counter[Sku]:
    return Counter({Sku.EVAL_RL: evaluation.tokens}) + _graders(evaluation.rollouts, cpu)


def _graders(rollouts: Sequence[Rollout], cpu: CpuSeconds) -> Counter[Sku]:
    grades = [one.grade for one in rollouts if one.grade is not None]
    return Counter(
        {
            Sku.REWARD_CPU_SECONDS: cpu.bill(sum(grade.cpu_seconds for grade in grades)),
            Sku.REWARD_LLM_INPUT: sum(grade.llm_input for grade in grades),
            Sku.REWARD_LLM_OUTPUT: sum(grade.llm_output for grade in grades),
        }
    )


def add_usage(message: pb.Step, used: Counter[Sku], unit: str) -> None:
    for sku, quantity in used.items():
        if quantity:
            message.usage.add(sku=sku, unit=f"{unit}:{message.step}", quantity=quantity)


def add_evaluation(message: pb.Step, evaluation: Evaluation, cpu: CpuSeconds) -> None:
    message.evaluation.tokens = evaluation.tokens
    message.evaluation.metrics.update(evaluation.metrics)
    add_usage(message, evaluation_usage(evaluation, cpu), "eval")


def step_metrics(sampled: Sampled, updated: Updated, *, reference: bool) -> dict[str, float]:
    """What is measured besides speed and memory. Where nothing was trained, nothing is said of ratios and the like."""
    rewards = np.array([one.reward for one in sampled.rollouts if one.reward is not None], dtype=np.float64)
    answers = [one for one in sampled.rollouts if one.completion is not None]
    silent = sum(not says_something(group) for group in by_group(sampled.rollouts))
    trained = [len(one.tokens) for one in sampled.rollouts if one.trained]
    return {
        "reward": float(rewards.mean()) if len(rewards) else math.nan,
        "reward_std": float(rewards.std(ddof=1)) if len(rewards) > 1 else 0.0,
        "groups": float(len(by_group(sampled.rollouts))),
        "zero_variance_groups": float(silent),
        "kept_groups": float(sum(says_something(group) for group in by_group(sampled.kept))),
        "rollouts": float(len(sampled.rollouts)),
        "failed_rollouts": float(len(sampled.rollouts) - len(rewards)),
        "truncated_rollouts": float(sum(one.finish == "length" for one in answers)),
        "new_tokens_mean": float(np.mean([len(one.tokens) for one in answers])) if answers else 0.0,
        "updates": float(updated.updates),
        "rollout_seconds": sampled.rollout_seconds,
        "reward_seconds": sampled.reward_seconds,
        **({"trained_tokens_mean": float(np.mean(trained))} if trained else {}),
    } | updated.sums.means(reference=reference)
