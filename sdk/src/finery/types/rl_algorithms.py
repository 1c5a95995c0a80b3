"""What each algorithm of reinforcement learning sets where a job leaves it open: one table, for service and workers."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

from finery.types.rl import AdvantageScale, Algorithm, LossNormalization, Overlong, RlHyperparameters


@dataclass(frozen=True)
class AlgorithmDefaults:
    baseline: Literal["mean", "leave_one_out"]
    """What a reward is compared with: the group's mean, or that of the others in it. Not a hyper-parameter."""
    ratio: Literal["token", "sequence", "detached"]
    """How the policy ratio enters the loss. Not a hyper-parameter."""
    advantage_scale: AdvantageScale
    loss_normalization: LossNormalization
    clip_low: float
    clip_high: float
    dynamic_sampling: bool = False
    overlong: Overlong = "keep"


ALGORITHMS: dict[Algorithm, AlgorithmDefaults] = {
    "grpo": AlgorithmDefaults("mean", "token", "group", "sequence", 0.2, 0.2),
    "dr_grpo": AlgorithmDefaults("mean", "token", "none", "constant", 0.2, 0.2),
    "rloo": AlgorithmDefaults("leave_one_out", "token", "none", "constant", 0.2, 0.2),
    "dapo": AlgorithmDefaults("mean", "token", "group", "token", 0.2, 0.28, True, "penalize"),
    "gspo": AlgorithmDefaults("mean", "sequence", "group", "sequence", 3e-4, 4e-4),
    "cispo": AlgorithmDefaults("mean", "detached", "group", "token", 1.0, 4.0, True, "penalize"),
}


def resolved(hyper: RlHyperparameters) -> RlHyperparameters:
    """The same with nothing left open that its algorithm sets; what was given stays."""
    defaults = ALGORITHMS[hyper.algorithm]
    names = ("advantage_scale", "loss_normalization", "clip_low", "clip_high", "dynamic_sampling", "overlong")
    changes = {name: getattr(defaults, name) for name in names if getattr(hyper, name) is None}
    if hyper.overlong_buffer is None and changes.get("overlong", hyper.overlong) == "penalize":
        changes["overlong_buffer"] = max(1, hyper.max_new_tokens // 4)
    return hyper.model_copy(update=changes)
