"""Advantages, penalties, masks, and what is joined: hand-worked numbers, cases C04, C05, C10, C11, C12, C23, C24."""

from __future__ import annotations

import math
import random

import pytest
from hypothesis import given
from hypothesis import strategies as st

from finery_gpu_workers.losses.advantages import (
    Scale,
    advantages,
    check_joined,
    overlong_penalty,
    token_advantages,
)
from finery_gpu_workers.losses.masks import TokenCounts, token_counts, trajectory

SCALES: list[Scale] = ["group", "batch", "none"]


def test_c23_groups_are_told_apart_by_id_in_any_order() -> None:
    """The deviations of {1, 0} are ±1/2, their standard deviation √(1/4 + 1/4) = 1/√2; of {10, 11} the same."""
    found = advantages([1, 10, 0, 11], ["P1", "P2", "P1", "P2"])
    assert found.values == pytest.approx([0.707107, -0.707107, -0.707107, 0.707107], abs=1e-6)


@given(st.randoms(use_true_random=False))
def test_c23_no_order_and_no_layout_over_ranks_changes_an_advantage(rng: random.Random) -> None:
    rows = [("P1", 1.0), ("P2", 10.0), ("P1", 0.0), ("P2", 11.0), ("P3", 2.0), ("P1", 5.0), ("P3", None)]
    places = list(range(len(rows)))
    rng.shuffle(places)
    straight = advantages([reward for _, reward in rows], [group for group, _ in rows]).values
    shuffled = advantages([rows[n][1] for n in places], [rows[n][0] for n in places]).values
    for place, value in zip(places, shuffled, strict=True):
        expected = straight[place]
        assert (value is None) == (expected is None)
        assert value is None or value == pytest.approx(expected, abs=1e-12)


def test_dr_grpo_does_not_divide_and_rloo_leaves_the_rollout_out() -> None:
    """Of {1, 2, 6}: the mean is 3; the means of the others are 4, 3.5, 1.5."""
    assert advantages([1, 2, 6], [0, 0, 0], scale="none").values == pytest.approx([-2, -1, 3])
    found = advantages([1, 2, 6], [0, 0, 0], baseline="leave_one_out", scale="none")
    assert found.values == pytest.approx([-3, -1.5, 4.5])


def test_scale_by_batch_divides_by_the_spread_of_all_rewards() -> None:
    """Of 0, 2, 4, 6 it is √((9 + 1 + 1 + 9) / 3) = 2.581989."""
    found = advantages([0, 2, 4, 6], [0, 0, 1, 1], scale="batch")
    assert found.values == pytest.approx([-1 / 2.581989, 1 / 2.581989, -1 / 2.581989, 1 / 2.581989], abs=1e-6)


@pytest.mark.parametrize("scale", SCALES)
def test_a_failed_rollout_is_in_no_baseline(scale: Scale) -> None:
    with_failure = advantages([1.0, None, 3.0, 0.0, 1.0], [0, 0, 0, 1, 1], scale=scale)
    without = advantages([1.0, 3.0, 0.0, 1.0], [0, 0, 1, 1], scale=scale)
    assert with_failure.values[1] is None
    assert [value for value in with_failure.values if value is not None] == without.values
    assert with_failure.groups[0].graded == 2


@pytest.mark.parametrize("scale", SCALES)
def test_one_alone_is_compared_with_nothing(scale: Scale) -> None:
    found = advantages([None, 3.0, None, 0.0, 1.0, None], [0, 0, 0, 1, 1, 2], scale=scale)
    assert found.values[:3] == [None, None, None]
    assert found.values[5] is None
    assert found.groups[0].zero_variance
    assert (found.groups[2].graded, found.groups[2].zero_variance) == (0, True)
    assert not found.groups[1].zero_variance


@pytest.mark.parametrize("scale", SCALES)
@pytest.mark.parametrize("rewards", [[0.3, 0.1 + 0.2, 0.3], [1e9, 1e9 + 1e-6], [0.0, 0.0], [-2.5] * 4])
def test_equal_rewards_give_exactly_zero_rounding_included(scale: Scale, rewards: list[float]) -> None:
    """0.1 + 0.2 is 0.30000000000000004: divided by the spread it would be an advantage of 1.15."""
    found = advantages([*rewards, 0.0, 1.0], [*["equal"] * len(rewards), "other", "other"], scale=scale)
    assert found.values[: len(rewards)] == [0.0] * len(rewards)
    assert found.groups["equal"].zero_variance


def test_c04_of_three_groups_one_is_kept() -> None:
    found = advantages([0.5, 0.5, 0.0, 1.0, 1.0, 1.0], [0, 0, 1, 1, 2, 2])
    assert [group for group, said in found.groups.items() if not said.zero_variance] == [1]


def test_c05_whether_a_group_says_something_does_not_depend_on_the_scale() -> None:
    rewards, groups = [0.5, 0.5, 0.0, 1.0, 2.0, 2.0], [0, 0, 1, 1, 2, 2]
    decisions = [[said.zero_variance for said in advantages(rewards, groups, scale=s).groups.values()] for s in SCALES]
    assert decisions == [[True, False, True]] * 3


def test_wrong_input_is_refused() -> None:
    with pytest.raises(ValueError, match="2 rewards and 1 groups"):
        advantages([1.0, 2.0], [0])
    for bad in (math.nan, math.inf):
        with pytest.raises(ValueError, match="finite"):
            advantages([1.0, bad], [0, 0])


def test_c12_time_passes_on_trained_tokens_only() -> None:
    assert token_advantages([1, 1, 0, 0], [0, 0, 0, 1], gamma=0.9) == pytest.approx([0.9, 1.0], abs=1e-9)
    assert token_advantages([1, 1, 0, 0], [0, 0, 0, 1], gamma=0.0) == pytest.approx([0.0, 1.0], abs=1e-9)


def test_token_advantages_with_values_by_hand() -> None:
    """δ_2 = 1 - 0.5 = 0.5; δ_1 = 0.9 × 0.5 - 0.2 = 0.25; A_1 = 0.25 + 0.9 × 0.5 × 0.5 = 0.475."""
    found = token_advantages([0, 1, 0, 1], [0, 0, 0, 1], gamma=0.9, lam=0.5, values=[9, 0.2, 9, 0.5])
    assert found == pytest.approx([0.475, 0.5], abs=1e-9)


def test_a_reward_of_the_environments_words_belongs_to_the_token_before() -> None:
    assert token_advantages([0, 1, 0, 1], [0, 0, 2, 1], gamma=1.0) == [3.0, 1.0]
    with pytest.raises(ValueError, match="before the first"):
        token_advantages([0, 1], [1, 0], gamma=1.0)
    with pytest.raises(ValueError, match="one length"):
        token_advantages([0, 1], [1], gamma=1.0)


@pytest.mark.parametrize(("length", "penalty"), [(0, 0), (12, 0), (13, -0.25), (15, -0.75), (16, -1)])
def test_the_overlong_penalty_falls_over_the_buffer(length: int, penalty: float) -> None:
    assert overlong_penalty(length, longest=16, buffer=4) == penalty


def test_the_overlong_penalty_refuses_what_makes_no_sense() -> None:
    for length, longest, buffer in ((17, 16, 4), (1, 16, 0), (1, 16, 17), (-1, 16, 4)):
        with pytest.raises(ValueError, match="expected 1 ≤ buffer"):
            overlong_penalty(length, longest=longest, buffer=buffer)


def test_c10_the_length_of_a_response_is_what_was_sampled_of_it() -> None:
    assert token_counts([0, 0, 1, 1, 0, 0, 0, 1]) == TokenCounts(response=3, trained=3, context=5)
    with pytest.raises(ValueError, match="0 and 1"):
        token_counts([0, 2])


def test_c11_what_is_trained_is_what_was_sampled() -> None:
    tokens, mask = trajectory([([1, 2], False), ([3, 4], True), ([5], False), ([6], True)])
    assert tokens == [1, 2, 3, 4, 5, 6]
    assert mask == [0, 0, 1, 1, 0, 1]
    with pytest.raises(ValueError, match="context before the first"):
        trajectory([([1], True)])


def test_c24_what_is_joined_has_one_entry_for_each_rollout() -> None:
    ids = [f"roll_1_{n}" for n in range(8)]
    check_joined(ids, kl=[0.0] * 8, rewards=[1.0] * 8)
    with pytest.raises(RuntimeError, match="kl: expected one for each of 8 rollouts, found 32"):
        check_joined(ids, kl=[0.0] * 32, rewards=[1.0] * 8)
    with pytest.raises(RuntimeError, match="distinct"):
        check_joined(ids * 4, kl=[0.0] * 32)
