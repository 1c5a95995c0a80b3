"""The loss of RL updates against TRL's own trainers on fixed tensors: made by bench/trl_policy.py."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from finery.types.rl import RlHyperparameters
from finery_gpu_workers.losses.policy import Counts
from finery_gpu_workers.methods.rl_sampling import Rollout
from finery_gpu_workers.methods.rl_update import Key, Sums, _Loss

from .rl_jobs import hyper, rollout

GOLDEN = json.loads((Path(__file__).parent / "golden/trl_policy.json").read_text())
LENGTHS: list[int] = GOLDEN["lengths"]
COUNTS = Counts(len(LENGTHS), sum(LENGTHS), GOLDEN["longest"])


def by_answer(name: str) -> tuple[Tensor, ...]:
    parts: tuple[Tensor, ...] = torch.tensor(GOLDEN[name]).split(LENGTHS)
    return parts


def answers() -> list[Rollout]:
    sampled = by_answer("sampled")
    made = [rollout(0, n, 0.0, range(1, 1 + LENGTHS[n]), advantage=GOLDEN["advantages"][n]) for n in range(4)]
    for one, log_probs in zip(made, sampled, strict=True):
        assert one.completion is not None
        one.completion.log_probs = log_probs.tolist()
    return made


def keyed(name: str) -> dict[Key, Tensor]:
    return {(0, n): values for n, values in enumerate(by_answer(name))}


def found(settings: RlHyperparameters, old: dict[Key, Tensor], parts: tuple[slice, ...]) -> tuple[float, list[float]]:
    """Loss and gradient, over micro-batches."""
    loss, gradient, made = 0.0, list[float](), answers()
    reference = keyed("reference") if settings.kl_coefficient else {}
    for part in parts:
        log_probs = torch.cat(by_answer("log_probs")[part]).requires_grad_()
        value = _Loss(settings, COUNTS, made[part], old, reference, Sums())(log_probs)
        value.backward()
        assert log_probs.grad is not None
        loss, gradient = loss + float(value.detach()), gradient + log_probs.grad.tolist()
    return loss, gradient


@pytest.mark.parametrize("case", GOLDEN["cases"], ids=lambda case: "-".join(map(str, case["settings"].values())))
def test_losses_and_gradients_are_those_of_trl(case: dict[str, Any]) -> None:
    settings = hyper(**({"max_new_tokens": GOLDEN["longest"], "importance_cap": None} | case["settings"]))
    assert any(case["gradient"])
    for parts in ((slice(0, 4),), (slice(0, 1), slice(1, 4))):
        loss, gradient = found(settings, keyed("old"), parts)
        assert loss == pytest.approx(case["loss"], abs=2e-6)
        assert gradient == pytest.approx(case["gradient"], abs=1e-6, rel=1e-5)


def test_the_gradient_of_rloo_is_that_of_trl_up_to_the_constant_length() -> None:
    """TRL sums over an answer's tokens; ours is that sum divided by `max_new_tokens`."""
    settings = hyper(algorithm="rloo", max_new_tokens=GOLDEN["longest"], importance_cap=None)
    _, gradient = found(settings, {}, (slice(0, 4),))
    assert [GOLDEN["longest"] * one for one in gradient] == pytest.approx(GOLDEN["rloo_gradient"], abs=1e-6)
