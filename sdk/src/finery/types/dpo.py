"""Learning from preferences: of two answers to a prompt, the chosen one becomes likelier."""

from __future__ import annotations

from typing import Annotated, Literal

from pydantic import Field

from finery.types.ids import FileId
from finery.types.spec import JobSpec, Passes

PreferenceLoss = Literal["sigmoid", "robust", "ipo", "hinge", "simpo", "orpo", "apo_zero", "apo_down"]
REFERENCE_FREE = frozenset({"simpo", "orpo"})
"""Losses that look at the policy only."""


class DpoHyperparameters(Passes):
    learning_rate: Annotated[float, Field(gt=0, le=1)] = 5e-5
    loss: PreferenceLoss = "sigmoid"
    """`sigmoid`: DPO (Rafailov et al. 2023, arXiv:2305.18290), with `label_smoothing` the conservative variant.
    `robust`: unbiased under label noise (Chowdhury et al. 2024, arXiv:2403.00409). `ipo`: squared, on log-probs per
    token (Azar et al. 2023, arXiv:2310.12036). `hinge`: SLiC (Zhao et al. 2023, arXiv:2305.10425). `simpo`: per token,
    with a `margin`, no reference (Meng et al. 2024, arXiv:2405.14734). `orpo`: odds ratio next to the likelihood of the
    chosen answer, no reference (Hong et al. 2024, arXiv:2403.07691). `apo_zero`, `apo_down`: anchored (D'Oosterlinck et
    al. 2024, arXiv:2408.06266)."""
    beta: Annotated[float, Field(gt=0, le=100)] | None = None
    """Strength: how much a log-ratio counts (`ipo`: the target margin is 1 / (2 beta); `orpo`: the weight of the odds
    ratio). None: 0.1, and 2.0 for `simpo`; the job shows which."""
    label_smoothing: Annotated[float, Field(ge=0, lt=0.5)] = 0.0
    """Share of pairs whose answers are assumed to be swapped. `sigmoid` and `robust` only; `robust` needs it above
    0."""
    margin: Annotated[float, Field(ge=0, le=100)] = 0.5
    """`simpo` only: by how much the chosen answer's reward shall be the higher one (gamma)."""
    sft_weight: Annotated[float, Field(ge=0, le=100)] = 0.0
    """Adds so much of the mean negative log-likelihood of the chosen answers' tokens. Not with `orpo`, which has it."""


_SIMPO_BETA, _BETA = 2.0, 0.1


def beta_of(hyper: DpoHyperparameters) -> float:
    """What `beta` None stands for. SimPO's rewards are means over tokens, not sums, so its beta is larger: 2.0 to 2.5
    in its paper."""
    if hyper.beta is not None:
        return hyper.beta
    return _SIMPO_BETA if hyper.loss == "simpo" else _BETA


def resolved(hyper: DpoHyperparameters) -> DpoHyperparameters:
    """With nothing left open."""
    return hyper.model_copy(update={"beta": beta_of(hyper)})


class DpoJobCreate(JobSpec):
    """The body of `POST /v1/jobs` for learning from preferences."""

    method: Literal["dpo"]
    training_file: FileId
    """Rows of the format preference."""
    validation_file: FileId | None = None
    hyperparameters: DpoHyperparameters = DpoHyperparameters()
