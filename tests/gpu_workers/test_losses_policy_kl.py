"""The divergence from the reference against hand-worked values and gradients; cases C05 and C20."""

from __future__ import annotations

import math

import pytest
import torch
from torch import Tensor

from finery_gpu_workers.losses.kl import Estimator, kl_estimate, kl_reward

ESTIMATORS: list[Estimator] = ["k1", "k2", "k3"]
C20 = {"k1": 0.5, "k2": 0.125, "k3": math.exp(-0.5) + 0.5 - 1}


def value_and_gradient(log_prob: float, reference: float, estimator: Estimator) -> tuple[float, float]:
    leaf = torch.tensor([log_prob], dtype=torch.float64, requires_grad=True)
    found = kl_estimate(leaf, torch.tensor([reference], dtype=torch.float64), estimator)
    found.sum().backward()
    assert leaf.grad is not None
    return float(found.detach()), float(leaf.grad)


@pytest.mark.parametrize("estimator", ESTIMATORS)
def test_c20_values_by_hand(estimator: Estimator) -> None:
    assert value_and_gradient(-1.0, -1.5, estimator)[0] == pytest.approx(C20[estimator], abs=1e-12)
    assert pytest.approx(0.106531, abs=1e-6) == C20["k3"]
    assert 0.1 * value_and_gradient(-1.0, -1.5, "k3")[0] == pytest.approx(0.0106531, abs=1e-7)


@pytest.mark.parametrize(("estimator", "expected"), [("k1", 0.5), ("k2", 0.5), ("k3", 1 - math.exp(-0.5))])
def test_c20_gradients_by_hand(estimator: Estimator, expected: float) -> None:
    assert value_and_gradient(-1.0, -1.5, estimator)[1] == pytest.approx(expected, abs=1e-12)


@pytest.mark.parametrize("estimator", ESTIMATORS)
@pytest.mark.parametrize("log_prob", [-1.0, -2.0])
def test_c20_a_step_moves_the_policy_towards_the_reference(estimator: Estimator, log_prob: float) -> None:
    slope = value_and_gradient(log_prob, -1.5, estimator)[1]
    assert abs(log_prob - 0.1 * slope + 1.5) < abs(log_prob + 1.5)


@pytest.mark.parametrize("estimator", ESTIMATORS)
def test_no_divergence_has_neither_value_nor_gradient(estimator: Estimator) -> None:
    assert value_and_gradient(-0.7, -0.7, estimator) == (0, 0)


@pytest.mark.parametrize("estimator", ESTIMATORS)
def test_the_mean_gradient_over_the_policys_samples_is_that_of_a_divergence(estimator: Estimator) -> None:
    """Over all tokens of a small vocabulary: of KL(p ‖ r) for k1 and k2, of KL(r ‖ p) for k3 (autograd of the sums)."""
    logits = torch.tensor([0.3, -1.0, 0.8], dtype=torch.float64)
    reference = torch.tensor([-0.2, 0.5, 0.1], dtype=torch.float64).log_softmax(-1)

    def slope(loss_of: object) -> Tensor:
        leaf = logits.clone().requires_grad_()
        assert callable(loss_of)
        loss_of(leaf.log_softmax(-1)).backward()
        assert leaf.grad is not None
        return leaf.grad

    sampled = slope(lambda p: (p.detach().exp() * kl_estimate(p, reference, estimator)).sum())
    if estimator == "k3":
        expected = slope(lambda p: (reference.exp() * (reference - p)).sum())
    else:
        expected = slope(lambda p: (p.exp() * (p - reference)).sum())
    assert torch.allclose(sampled, expected, atol=1e-12)
    # What k1 would give as it stands: nothing.
    assert torch.allclose(
        slope(lambda p: (p.detach().exp() * (p - reference)).sum()), torch.zeros(3).double(), atol=1e-12
    )


def test_c05_the_divergence_stays_where_a_group_says_nothing() -> None:
    """The policy term of equal rewards is 0; 0.1 × k3 is all that is left, and it is kept (docs/rl.md)."""
    assert 0.1 * value_and_gradient(-1.0, -1.5, "k3")[0] == pytest.approx(0.0106531, abs=1e-6)


def test_as_a_reward_it_is_summed_by_sequence_and_has_no_gradient() -> None:
    log_probs = torch.tensor([-1.0, -1.0, -2.0], requires_grad=True)
    reference = torch.tensor([-1.5, -1.25, -1.0])
    assert kl_reward(log_probs, reference, "k1", [2, 1]) == pytest.approx([0.75, -1.0])
    assert kl_reward(log_probs, reference, "k2", [2, 1]) == pytest.approx([0.125 + 0.03125, 0.5])
    with pytest.raises(ValueError, match="sum of 3 tokens"):
        kl_reward(log_probs, reference, "k1", [2])


def test_wrong_shapes_are_refused() -> None:
    with pytest.raises(ValueError, match="one shape"):
        kl_estimate(torch.zeros(2), torch.zeros(3), "k1")
