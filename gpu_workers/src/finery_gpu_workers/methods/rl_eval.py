"""Evaluation on held-out prompts: one greedy answer to each, and more for pass@k. It changes nothing that trains."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from typing import Any

from finery.types.rl import RlHyperparameters
from finery_gpu_workers.data.prompts import Prompt
from finery_gpu_workers.losses.passes import Estimate, mean_reward, pass_at_k, rate
from finery_gpu_workers.methods.rl_plan import RlPlan
from finery_gpu_workers.methods.rl_sampling import Asked, Collector, Rollout
from finery_gpu_workers.methods.rl_terms import by_group
from finery_gpu_workers.rollout.types import Sampling


@dataclass(frozen=True)
class Evaluation:
    """Of all held-out prompts, after a step."""

    step: int
    reward: float
    """Mean over the greedy answers that have one; NaN where none has."""
    tokens: int
    """Generated, in rollouts that have a reward."""
    metrics: dict[str, float]
    rollouts: list[Rollout] = field(repr=False)
    lost: list[Rollout] = field(repr=False)

    def as_dict(self) -> dict[str, Any]:
        named = {name: value for name, value in self.metrics.items() if math.isfinite(value)}
        return {"step": self.step, "tokens": self.tokens} | named


def evaluate(
    step: int,
    prompts: Sequence[Prompt],
    plan: RlPlan,
    sampling: Sampling,
    collector: Collector,
    version: int,
) -> Evaluation:
    """Sample 0 of a group is the greedy answer, the others are drawn as in training, with seeds of their own."""
    greedy = replace(sampling, temperature=0.0, top_p=1.0, top_k=None, min_p=0.0)
    asked = [Asked(n, prompt, (0,)) for n, prompt in enumerate(prompts)]
    found = collector.collect(asked, greedy, version)
    rollouts, lost = found.rollouts, found.lost
    if plan.hyper.eval_samples:
        drawn = [Asked(n, prompt, plan.evaluation_seeds(prompt.place), 1) for n, prompt in enumerate(prompts)]
        found = collector.collect(drawn, sampling, version)
        rollouts, lost = rollouts + found.rollouts, lost + found.lost
    groups = by_group(rollouts)
    rewarded = [one for one in rollouts if one.reward is not None]
    greedy_rewards = [group[0].reward for group in groups if group[0].reward is not None]
    metrics = _named("reward", mean_reward(greedy_rewards)) if greedy_rewards else {"reward": math.nan}
    metrics |= _passes([[one.reward for one in group[1:] if one.reward is not None] for group in groups], plan.hyper)
    metrics["failed_rollouts"] = float(len(rollouts) - len(rewarded))
    return Evaluation(
        step,
        metrics["reward"],
        sum(len(one.tokens) for one in rewarded),
        metrics,
        [one for group in groups for one in group],
        lost,
    )


def _passes(groups: Sequence[Sequence[float]], hyper: RlHyperparameters) -> dict[str, float]:
    """pass@1, 2, 4, …; all over the same prompts: those with as many graded samples as the largest k needs."""
    ks = [2**power for power in range(hyper.eval_samples.bit_length())]
    usable = [group for group in groups if ks and len(group) >= ks[-1]]
    found: dict[str, float] = {}
    for k in ks if usable else ():
        passed = [(len(group), sum(reward >= hyper.pass_threshold for reward in group)) for group in usable]
        found |= _named(f"pass_at_{k}", rate([pass_at_k(count, passes, k) for count, passes in passed]))
    return found


def _named(name: str, found: Estimate) -> dict[str, float]:
    bounds = {f"{name}_low": found.low, f"{name}_high": found.high}
    return {name: found.mean} | {key: value for key, value in bounds.items() if value is not None}
