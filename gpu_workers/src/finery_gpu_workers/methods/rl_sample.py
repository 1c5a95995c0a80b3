"""What a step samples: its groups, and with dynamic sampling further ones for those whose rewards say nothing."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

from finery.types.rl import RlHyperparameters
from finery_gpu_workers.data.prompts import Prompt
from finery_gpu_workers.methods.rl_plan import RlPlan
from finery_gpu_workers.methods.rl_sampling import Asked, Collector, Rollout
from finery_gpu_workers.methods.rl_terms import by_group, says_something
from finery_gpu_workers.rollout.types import Sampling


@dataclass
class Sampled:
    """All rollouts of a step, in the order of groups and samples."""

    rollouts: list[Rollout] = field(default_factory=list)
    kept: list[Rollout] = field(default_factory=list)
    """Those of the groups that have a part in the updates."""
    lost: list[Rollout] = field(default_factory=list)
    rollout_seconds: float = 0.0
    reward_seconds: float = 0.0


def enough_graded(rollouts: Sequence[Rollout], hyper: RlHyperparameters) -> bool:
    """Of a step or an evaluation."""
    return sum(one.reward is not None for one in rollouts) / len(rollouts) >= hyper.min_graded


def sample_step(
    number: int,
    plan: RlPlan,
    prompt: Callable[[int], Prompt],
    collector: Collector,
    sampling: Sampling,
    version: int,
) -> Sampled:
    """Every group of every round has all its rollouts, in whatever state."""
    done, chosen, used = Sampled(), plan.step(number).prompts, set[int]()
    rounds = 1 + (plan.hyper.max_resampling if plan.hyper.dynamic_sampling else 0)
    groups = kept = 0
    for round_ in range(rounds):
        asked = [
            Asked(groups + n, prompt(index), plan.seeds(number, round_, groups + n)) for n, index in enumerate(chosen)
        ]
        found = collector.collect(asked, sampling, version)
        _add(done, found.rollouts, keep_all=not plan.hyper.dynamic_sampling)
        done.lost += found.lost
        done.rollout_seconds += found.rollout_seconds
        done.reward_seconds += found.reward_seconds
        groups += len(chosen)
        used |= set(chosen)
        kept = len(by_group(done.kept))
        if kept >= plan.hyper.prompts_per_step or not enough_graded(done.rollouts, plan.hyper):
            break
        chosen = plan.further(number, plan.hyper.prompts_per_step - kept, used)
        if not chosen:
            break
    _check(done, groups, plan)
    return done


def _add(done: Sampled, rollouts: Sequence[Rollout], *, keep_all: bool) -> None:
    done.rollouts += rollouts
    for group in by_group(rollouts):
        if keep_all or says_something(group):
            done.kept += group
        else:
            for one in group:  # compared, and equal
                one.advantage = 0.0 if one.reward is not None else None


def _check(done: Sampled, groups: int, plan: RlPlan) -> None:
    sizes = {len(group) for group in by_group(done.rollouts)}
    if len(by_group(done.rollouts)) != groups or sizes != {plan.hyper.samples_per_prompt}:
        expected = f"{groups} groups of {plan.hyper.samples_per_prompt} rollouts"
        raise RuntimeError(f"expected {expected}, found {len(done.rollouts)} rollouts in groups of {sorted(sizes)}")
