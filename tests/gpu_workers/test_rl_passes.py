"""Means, rates and pass@k with their intervals: hand-worked, and the tables of textbooks."""

from __future__ import annotations

import itertools
import math

import pytest

from finery_gpu_workers.losses.passes import mean_reward, pass_at_k, rate, student_t


@pytest.mark.parametrize(
    ("samples", "passed", "k", "expected"),
    [(4, 1, 1, 1 / 4), (4, 1, 2, 1 / 2), (4, 2, 2, 5 / 6), (4, 0, 4, 0), (4, 1, 4, 1), (5, 2, 3, 9 / 10), (3, 3, 2, 1)],
)
def test_pass_at_k_by_hand(samples: int, passed: int, k: int, expected: float) -> None:
    assert pass_at_k(samples, passed, k) == pytest.approx(expected, abs=1e-12)


def test_pass_at_k_is_the_share_of_choices_with_a_pass() -> None:
    answers = [1, 1, 0, 0, 0, 0]
    for k in range(1, 7):
        chosen = list(itertools.combinations(answers, k))
        assert pass_at_k(6, 2, k) == pytest.approx(sum(map(any, chosen)) / len(chosen), abs=1e-12)


@pytest.mark.parametrize(("samples", "passed", "k"), [(4, 1, 5), (4, 5, 1), (4, 1, 0), (4, -1, 1)])
def test_pass_at_k_refuses_what_makes_no_sense(samples: int, passed: int, k: int) -> None:
    with pytest.raises(ValueError, match="expected 1 ≤ k"):
        pass_at_k(samples, passed, k)


@pytest.mark.parametrize(
    ("freedom", "expected"),
    [
        (1, 12.706),
        (2, 4.303),
        (3, 3.182),
        (4, 2.776),
        (5, 2.571),
        (10, 2.228),
        (29, 2.045),
        (120, 1.980),
        (5000, 1.960),
    ],
)
def test_students_t_as_in_the_tables(freedom: int, expected: float) -> None:
    assert student_t(freedom) == pytest.approx(expected, abs=5e-4)


def test_a_mean_of_numbers_has_students_interval() -> None:
    """Of 1, 2, 3: mean 2, deviation 1, so ± 4.302653 / √3 = 2.484138."""
    found = mean_reward([1, 2, 3])
    assert (found.mean, found.low, found.high) == pytest.approx((2, 2 - 2.484138, 2 + 2.484138), abs=1e-5)
    assert mean_reward([0.3]) == type(found)(0.3, None, None)
    with pytest.raises(ValueError, match="none"):
        mean_reward([])


def test_a_mean_of_passes_has_wilsons_interval() -> None:
    """10 of 10: the lower bound is 1 / (1 + z²/n) = 10 / 13.841459; 5 of 10 by the formula: 0.2366 to 0.7634."""
    found = mean_reward([1.0] * 10)
    assert (found.mean, found.low, found.high) == pytest.approx((1, 10 / 13.841459, 1), abs=1e-6)
    half = mean_reward([0.0, 1.0] * 5)
    assert (half.low, half.high) == pytest.approx((0.23659, 0.76341), abs=1e-5)
    none = rate([0.0] * 10)
    assert (none.low, none.high) == pytest.approx((0, 3.841459 / 13.841459), abs=1e-6)


def test_rates_lie_between_0_and_1() -> None:
    assert rate([0.5]).mean == 0.5
    for bad in ([], [1.1], [-0.1], [math.nan]):
        with pytest.raises(ValueError, match="between 0 and 1"):
            rate(bad)
