"""The learning rate of a step: a pure function, so that resuming needs no state."""

from __future__ import annotations

import math

from finery.types.methods import Schedule


def learning_rate(step: int, total_steps: int, peak: float, schedule: Schedule, warmup_ratio: float) -> float:
    """Rate of step 1 … total_steps: a linear rise to `peak` in ⌈warmup_ratio × total_steps⌉ steps, then the schedule.

    Neither the first nor the last step has rate 0, so every step trains.
    """
    if not 1 <= step <= total_steps:
        raise ValueError(f"step: expected 1 to {total_steps}, found {step}")
    # Not 4 steps of 100 at a ratio of 0.03 because of how 0.03 rounds.
    warmup = math.ceil(total_steps * warmup_ratio - 1e-9)
    if step <= warmup:
        return peak * step / warmup
    done = (step - 1 - warmup) / (total_steps - warmup)
    if schedule == "linear":
        return peak * (1.0 - done)
    if schedule == "cosine":
        return peak * 0.5 * (1.0 + math.cos(math.pi * done))
    return peak
