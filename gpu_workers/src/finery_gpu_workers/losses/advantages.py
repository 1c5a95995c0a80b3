"""Advantages: how much better a rollout did than others of its prompt. Pure; groups are told apart by id, not by place.

A reward of None means that there is none: such a rollout is not compared, and others are not compared with it.
"""

from __future__ import annotations

from collections.abc import Hashable, Sequence
from dataclasses import dataclass
from typing import Literal

import numpy as np
from numpy.typing import NDArray

Baseline = Literal["mean", "leave_one_out"]
Scale = Literal["group", "batch", "none"]
Floats = NDArray[np.float64]

# Rewards this close together are equal: dividing by the spread would blow rounding up to advantages of ±1.
_ROUNDING = 1e-9


@dataclass(frozen=True)
class Group:
    """What a group's rewards say, whatever advantages are divided by."""

    graded: int
    """Rollouts with a reward."""
    zero_variance: bool
    """All its rewards are equal (one alone is), so that nothing can be learned from comparing them."""


@dataclass(frozen=True)
class Advantages:
    values: list[float | None]
    """[rollouts], in the order given; None where a rollout was not compared: it, or all others of its group, has no
    reward."""
    groups: dict[Hashable, Group]
    """By id, in the order in which they come first."""


def advantages(
    rewards: Sequence[float | None], groups: Sequence[Hashable], *, baseline: Baseline = "mean", scale: Scale = "group"
) -> Advantages:
    """Group-relative advantages of N rollouts.

    With μ the mean and σ the standard deviation of the n rewards r that there are in a rollout's group,

        baseline mean            A = r - μ                      GRPO (Shao et al. 2024, arXiv:2402.03300), Dr. GRPO
        baseline leave_one_out   A = r - (nμ - r) / (n - 1)     RLOO (Ahmadian et al. 2024, arXiv:2402.14740)
        scale group              A / σ                          GRPO
        scale batch              A / σ of all rewards           Liu et al. 2025 (arXiv:2508.08221)
        scale none               A                              Dr. GRPO (Liu et al. 2025, arXiv:2503.20783)

    σ is the sample's, divided by n - 1, as torch.std has it. No epsilon is added to it: rewards {1, 0} give exactly
    ±0.5/√0.5 = ±0.707107; where all rewards are equal A is 0, without a division, for every scale alike.

    rewards [N], None for none; groups [N]. Raises ValueError on other lengths, and on rewards that are not finite.
    """
    given, there = _given(rewards, len(groups))
    everything = _spread(given[there]) if scale == "batch" else 1.0
    members: dict[Hashable, list[int]] = {group: [] for group in groups}
    for place, group in enumerate(groups):
        if there[place]:
            members[group].append(place)
    values: list[float | None] = [None] * len(rewards)
    found: dict[Hashable, Group] = {}
    for group, places in members.items():
        mine = given[places]
        found[group] = Group(len(mine), are_equal(mine))
        if len(mine) > 1:
            compared = np.zeros(len(mine))
            if not found[group].zero_variance:
                compared = _compared(mine, baseline) / (_spread(mine) if scale == "group" else everything)
            for place, value in zip(places, compared.tolist(), strict=True):
                values[place] = value
    return Advantages(values, found)


def _given(rewards: Sequence[float | None], groups: int) -> tuple[Floats, NDArray[np.bool_]]:
    """Rewards, NaN where there is none, and where there are some."""
    if len(rewards) != groups:
        raise ValueError(f"expected a group for every reward, found {len(rewards)} rewards and {groups} groups")
    given = np.array([np.nan if reward is None else reward for reward in rewards], dtype=np.float64)
    there = np.array([reward is not None for reward in rewards], dtype=np.bool_)
    if not np.isfinite(given[there]).all():
        raise ValueError(f"rewards: expected finite numbers or None, found {given[there].tolist()}")
    return given, there


def are_equal(rewards: Floats) -> bool:
    """Within rounding; fewer than two always are."""
    if len(rewards) < 2:
        return True
    return bool(np.ptp(rewards) <= _ROUNDING * max(1.0, float(np.abs(rewards).max())))


def _compared(rewards: Floats, baseline: Baseline) -> Floats:
    if baseline == "mean":
        others: Floats = np.full(len(rewards), rewards.mean())
    else:
        others = (rewards.sum() - rewards) / (len(rewards) - 1)
    compared: Floats = rewards - others
    return compared


def _spread(rewards: Floats) -> float:
    return float(rewards.std(ddof=1)) if len(rewards) > 1 else 0.0


def token_advantages(
    mask: Sequence[int],
    rewards: Sequence[float],
    *,
    gamma: float,
    lam: float = 1.0,
    values: Sequence[float] | None = None,
) -> list[float]:
    """Generalised advantage estimation (Schulman et al. 2016, arXiv:1506.02438) over a trajectory's trained tokens.

        δ_k = r_k + γ V_{k+1} - V_k,   A_k = δ_k + γ λ A_{k+1},   V and A are 0 behind the end

    k counts trained tokens only: words of the environment between two of them are no time that passes, and a reward
    that comes on such words belongs to the trained token before them. (Counted as time, they would discount a final
    reward once more for each of them, and a γ of 0 would lose it.)

    mask [T], 1 for a trained token; rewards [T]; values [T], 0 where left out. Returns one advantage per trained token.
    Raises ValueError on other lengths, and on a reward before the first trained token, which earned it.
    """
    values = [0.0] * len(mask) if values is None else values
    if not len(mask) == len(rewards) == len(values):
        found = f"{len(mask)}, {len(rewards)} and {len(values)}"
        raise ValueError(f"expected mask, rewards and values of one length, found {found}")
    earned: list[float] = []
    for trained, reward in zip(mask, rewards, strict=True):
        if trained:
            earned.append(0.0)
        if reward and not earned:
            raise ValueError("rewards: expected none before the first trained token, which cannot have earned it")
        if earned:
            earned[-1] += reward
    expected = [value for trained, value in zip(mask, values, strict=True) if trained] + [0.0]
    found_advantages, later = [0.0] * len(earned), 0.0
    for k in reversed(range(len(earned))):
        later = earned[k] + gamma * expected[k + 1] - expected[k] + gamma * lam * later
        found_advantages[k] = later
    return found_advantages


def overlong_penalty(length: int, *, longest: int, buffer: int) -> float:
    """What long answers lose of their reward: DAPO's soft punishment (Yu et al. 2025, arXiv:2503.14476, eq. 13).

        0                              length ≤ longest - buffer
        (longest - buffer - length) / buffer    up to longest, where it is -1

    Raises ValueError unless 1 ≤ buffer ≤ longest and 0 ≤ length ≤ longest.
    """
    if not 1 <= buffer <= longest or not 0 <= length <= longest:
        raise ValueError(f"expected 1 ≤ buffer ≤ longest ≥ length ≥ 0, found {buffer}, {longest}, {length}")
    return min(0.0, (longest - buffer - length) / buffer)


def check_joined(ids: Sequence[Hashable], **columns: Sequence[object]) -> None:
    """What was computed apart (by micro-batch, by rank) and put together again: one entry for each rollout, none twice.

    Raises RuntimeError naming the column: a gather that ran twice doubles it silently, and tokens are billed twice.
    """
    if len(set(ids)) != len(ids):
        raise RuntimeError(f"rollouts: expected distinct ids, found {len(ids)} with {len(set(ids))} distinct ones")
    for name, column in columns.items():
        if len(column) != len(ids):
            raise RuntimeError(f"{name}: expected one for each of {len(ids)} rollouts, found {len(column)}")
