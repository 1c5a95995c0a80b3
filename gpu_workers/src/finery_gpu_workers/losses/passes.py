"""What evaluations say, and how surely: means, rates and pass@k with 95 % confidence intervals."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

_Z = 1.959963984540054
"""Of the standard normal distribution, two-sided 95 %."""


@dataclass(frozen=True)
class Estimate:
    mean: float
    low: float | None
    high: float | None
    """Bounds of the interval; None where the sample is too small to have one."""


def pass_at_k(samples: int, passed: int, k: int) -> float:
    """1 - C(n - c, k) / C(n, k): how likely one of k answers passes, without bias (Chen et al. 2021, arXiv:2107.03374).

    n = samples, c = passed. Raises ValueError unless 1 ≤ k ≤ n and 0 ≤ c ≤ n.
    """
    if not 1 <= k <= samples or not 0 <= passed <= samples:
        raise ValueError(f"expected 1 ≤ k ≤ samples ≥ passed ≥ 0, found k {k}, samples {samples}, passed {passed}")
    return 1.0 - math.comb(samples - passed, k) / math.comb(samples, k)


def mean_reward(rewards: Sequence[float]) -> Estimate:
    """Mean over prompts. Where every reward is 0 or 1 it is a rate (see `rate`); else Student's interval,

        mean ± t(0.975, n - 1) × s / √n,   s the sample's standard deviation

    which a single reward does not have. Raises ValueError without rewards.
    """
    if not rewards:
        raise ValueError("expected at least one reward, found none")
    if set(rewards) <= {0.0, 1.0}:
        return rate(rewards)
    mean = float(np.mean(rewards))
    if len(rewards) == 1:
        return Estimate(mean, None, None)
    half = student_t(len(rewards) - 1) * float(np.std(rewards, ddof=1)) / math.sqrt(len(rewards))
    return Estimate(mean, mean - half, mean + half)


def rate(chances: Sequence[float]) -> Estimate:
    """Mean of values between 0 and 1, one per prompt, with Wilson's interval (Wilson 1927):

        (p + z²/2n ± z √(p(1 - p)/n + z²/4n²)) / (1 + z²/n)

    It is never empty, also where all values are 0 or all are 1. For values between 0 and 1 it is cautious: none vary
    more than p(1 - p). Raises ValueError on values outside, and without any.
    """
    if not chances or not all(0 <= chance <= 1 for chance in chances):
        raise ValueError(f"expected at least one value, all between 0 and 1, found {list(chances)[:5]}")
    n, p = len(chances), float(np.mean(chances))
    middle, scale = p + _Z**2 / (2 * n), 1 + _Z**2 / n
    half = _Z * math.sqrt(p * (1 - p) / n + _Z**2 / (4 * n**2))
    return Estimate(p, max(0.0, (middle - half) / scale), min(1.0, (middle + half) / scale))


def student_t(freedom: int) -> float:
    """The two-sided 95 % quantile of Student's t: P(|t| ≤ it) = 0.95 with so many degrees of freedom, by bisection.

    P(|t| ≤ √ν tan θ) has a closed form (Abramowitz & Stegun 26.7.3 and 26.7.4), with u = cos² θ:

        ν odd    2/π (θ + sin θ cos θ (1 + 2/3 u + 2·4/(3·5) u² + …)), (ν - 1)/2 terms in the inner brackets
        ν even   sin θ (1 + 1/2 u + 1·3/(2·4) u² + …), ν/2 terms
    """
    odd = freedom % 2
    terms = np.arange(1, (freedom - odd) // 2, dtype=np.float64)
    factors = np.cumprod(np.concatenate([[1.0], 2 * terms / (2 * terms + 1) if odd else (2 * terms - 1) / (2 * terms)]))
    powers = np.arange(len(factors))

    def chance(angle: float) -> float:
        series = float((factors * math.cos(angle) ** (2 * powers)).sum())
        if not odd:
            return math.sin(angle) * series
        return 2 / math.pi * (angle + (math.sin(angle) * math.cos(angle) * series if freedom > 1 else 0.0))

    low, high = 0.0, math.pi / 2
    for _ in range(60):
        middle = (low + high) / 2
        low, high = (middle, high) if chance(middle) < 0.95 else (low, middle)
    return math.sqrt(freedom) * math.tan(low)
