"""F-PREF: policy -10 (4 tokens) and -15 (5 tokens), reference -12 and -14, beta 0.1: log-ratios +2 and -1, margin 3.

Expected values are worked by hand, with σ(0.3) = 0.5744425168 and softplus(-0.3) = 0.5543552445.
"""

from __future__ import annotations

import json
import math
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from finery.types.dpo import DpoHyperparameters
from finery_gpu_workers.losses.preference import Pairs, preference_loss

GOLDEN = json.loads((Path(__file__).parent / "golden/trl_preference.json").read_text())


def vector(*values: float) -> Tensor:
    return torch.tensor(values, dtype=torch.float32)


F_PREF = Pairs(vector(-10.0), vector(-15.0), vector(-12.0), vector(-14.0), vector(4.0), vector(5.0))
FREE = replace(F_PREF, chosen_reference=None, rejected_reference=None)


def loss(pairs: Pairs = F_PREF, **hyper: Any) -> float:
    return preference_loss(pairs, DpoHyperparameters(**{"beta": 0.1} | hyper)).losses.item()


def log_odds(p: float) -> float:
    return math.log(p / (1 - p))


ORPO = 2.5 + 0.1 * math.log1p(math.exp(-(log_odds(math.exp(-2.5)) - log_odds(math.exp(-3.0)))))
ORACLES = [
    ({"loss": "sigmoid"}, F_PREF, 0.5543552),
    ({"loss": "sigmoid", "label_smoothing": 0.1}, F_PREF, 0.584355),
    ({"loss": "robust", "label_smoothing": 0.1}, F_PREF, 0.516855),
    ({"loss": "ipo"}, F_PREF, (2 / 4 + 1 / 5 - 5) ** 2),
    ({"loss": "hinge"}, F_PREF, 0.7),
    ({"loss": "hinge", "beta": 0.5}, F_PREF, 0.0),
    ({"loss": "simpo", "beta": 2.0, "margin": 0.5}, FREE, math.log1p(math.exp(-(2 * (-2.5 + 3.0) - 0.5)))),
    ({"loss": "orpo"}, FREE, ORPO),
    ({"loss": "apo_zero"}, F_PREF, 1 - 1 / (1 + math.exp(-0.2)) + 1 / (1 + math.exp(0.1))),
    ({"loss": "apo_down"}, F_PREF, 1 / (1 + math.exp(-0.2)) + 1 - 0.5744425),
]


@pytest.mark.parametrize(("hyper", "pairs", "expected"), ORACLES, ids=lambda value: str(value)[:40])
def test_every_loss_is_its_formula(hyper: dict[str, Any], pairs: Pairs, expected: float) -> None:
    assert loss(pairs, **hyper) == pytest.approx(expected, abs=2e-6)


def test_rewards_margin_and_accuracy() -> None:
    terms = preference_loss(F_PREF, DpoHyperparameters(beta=0.1))
    found = (terms.chosen_rewards, terms.rejected_rewards, terms.margins, terms.accuracies)
    assert [value.item() for value in found] == pytest.approx([0.2, -0.1, 0.3, 1.0])


def test_at_the_start_the_loss_is_log_2_and_the_accuracy_one_half() -> None:
    start = replace(F_PREF, chosen_reference=F_PREF.chosen, rejected_reference=F_PREF.rejected)
    terms = preference_loss(start, DpoHyperparameters())
    assert terms.losses.item() == pytest.approx(0.693147, abs=1e-6)
    assert (terms.margins.item(), terms.accuracies.item()) == (0.0, 0.5)


@pytest.mark.parametrize(
    ("hyper", "chosen"),
    [
        # d/dc of -log σ(b d) = -b σ(-b d); of the others by the chain rule, by hand.
        ({"loss": "sigmoid"}, -0.1 * (1 - 0.5744425)),
        ({"loss": "sigmoid", "label_smoothing": 0.1}, -0.1 * (0.9 * (1 - 0.5744425) - 0.1 * 0.5744425)),
        ({"loss": "robust", "label_smoothing": 0.1}, -0.1 * (0.9 * (1 - 0.5744425) + 0.1 * 0.5744425) / 0.8),
        ({"loss": "ipo"}, 2 * (0.7 - 5) / 4),
        ({"loss": "hinge"}, -0.1),
    ],
    ids=lambda value: str(value)[:40],
)
def test_the_gradient_is_the_formulas(hyper: dict[str, Any], chosen: float) -> None:
    policy = vector(-10.0).requires_grad_()
    preference_loss(replace(F_PREF, chosen=policy), DpoHyperparameters(**{"beta": 0.1} | hyper)).losses.sum().backward()
    assert policy.grad is not None
    assert policy.grad.item() == pytest.approx(chosen, abs=1e-6)


def test_orpo_of_a_certain_answer_is_finite() -> None:
    certain = replace(FREE, chosen=vector(0.0).requires_grad_())
    terms = preference_loss(certain, DpoHyperparameters(loss="orpo"))
    terms.losses.sum().backward()
    assert terms.losses.isfinite().all()
    assert certain.chosen.grad is not None
    assert certain.chosen.grad.isfinite().all()


def test_what_does_not_fit_is_refused() -> None:
    with pytest.raises(ValueError, match="expected the reference"):
        loss(FREE, loss="sigmoid")
    with pytest.raises(ValueError, match="expected no reference"):
        loss(F_PREF, loss="simpo")
    with pytest.raises(ValueError, match="one length"):
        loss(replace(F_PREF, rejected=vector(-1.0, -2.0)))
    with pytest.raises(ValueError, match="at least one scored token"):
        loss(replace(F_PREF, chosen_tokens=vector(0.0)))


@pytest.mark.parametrize("case", GOLDEN["cases"], ids=lambda case: case["loss"])
def test_losses_and_gradients_are_those_of_trl(case: dict[str, Any]) -> None:
    """Made by bench/trl_preference.py with TRL's own `DPOTrainer` on fixed tensors."""
    fixed = {name: torch.tensor(values) for name, values in GOLDEN["pairs"].items()}
    fixed["chosen"].requires_grad_()
    fixed["rejected"].requires_grad_()
    hyper = DpoHyperparameters(loss=case["loss"], beta=case["beta"], label_smoothing=case["label_smoothing"])
    total = preference_loss(Pairs(**fixed), hyper).losses.mean()
    total.backward()
    assert total.item() == pytest.approx(case["mean_loss"], abs=2e-6)
    for name in ("chosen", "rejected"):
        assert fixed[name].grad is not None
        torch.testing.assert_close(fixed[name].grad, torch.tensor(case["gradients"][name]), atol=1e-6, rtol=1e-5)
