"""The learning rate of a step: a pure function, so that resuming needs no state."""

from __future__ import annotations

import math

from finery.types.methods import Schedule


def learning_rate(
    step: int, total_steps: int, peak: float, schedule: Schedule, warmup_ratio: float, decay_ratio: float = 1.0
) -> float:
    """Rate of step s = 1 … T: a linear rise to `peak` in W = ⌈warmup_ratio × T⌉ steps, then the schedule.

    With d = (s - 1 - W) / (T - W), the part that is done, the factor on `peak` is

        s ≤ W      s / W
        linear     1 - d
        cosine     (1 + cos(π d)) / 2
        constant   1
        wsd        min(1, (T - s + 1) / D), D = min(⌈decay_ratio × T⌉, T - W)

    wsd (warm-up, stable, decay) is that of MiniCPM (Hu et al. 2024, arXiv:2404.06395) with the linear decay of Hägele
    et al. 2024 (arXiv:2405.18392). Neither the first nor the last step has rate 0, so every step trains.
    """
    if not 1 <= step <= total_steps:
        raise ValueError(f"step: expected 1 to {total_steps}, found {step}")
    warmup = _steps(warmup_ratio, total_steps)
    if step <= warmup:
        return peak * step / warmup
    done = (step - 1 - warmup) / (total_steps - warmup)
    if schedule == "linear":
        return peak * (1.0 - done)
    if schedule == "cosine":
        return peak * 0.5 * (1.0 + math.cos(math.pi * done))
    if schedule == "wsd":
        decay = min(_steps(decay_ratio, total_steps), total_steps - warmup)
        return peak * min(1.0, (total_steps - step + 1) / decay)
    return peak


def _steps(ratio: float, total_steps: int) -> int:
    # Not 4 steps of 100 at a ratio of 0.03 because of how 0.03 rounds.
    return math.ceil(total_steps * ratio - 1e-9)
