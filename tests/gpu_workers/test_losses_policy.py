"""Policy losses against hand-worked values and gradients; cases C05, C06, C08, C11."""

from __future__ import annotations

import math
from typing import Any

import pytest
import torch
from torch import Tensor

from finery_gpu_workers.losses.masks import trajectory
from finery_gpu_workers.losses.policy import (
    Counts,
    Normalization,
    Ratio,
    importance_weights,
    policy_terms,
    token_weights,
)

LOG2 = math.log(2)


def wide(*values: float) -> Tensor:
    return torch.tensor(values, dtype=torch.float64)


def gradient(log_probs: Tensor, old: Tensor, advantages: Tensor, lengths: list[int], **options: Any) -> list[float]:
    leaf = log_probs.clone().requires_grad_()
    policy_terms(leaf, old, advantages, lengths, **options).losses.sum().backward()
    assert leaf.grad is not None
    return leaf.grad.tolist()


BOUNDS: dict[str, Any] = {"clip_low": 0.2, "clip_high": 0.28}


def test_the_clipped_ratio_by_hand() -> None:
    """Ratios 2, 1/2, 2, 1/2 with advantages 1, 1, -1, -1: min(2, 1.28), min(.5, .8), min(-2, -1.28), min(-.5, -.8)."""
    log_probs, old = wide(LOG2, -LOG2, LOG2, -LOG2), wide(0, 0, 0, 0)
    found = policy_terms(log_probs, old, wide(1, 1, -1, -1), [4], **BOUNDS)
    assert found.losses.tolist() == pytest.approx([-1.28, -0.5, 2.0, 0.8])
    assert found.ratios.tolist() == pytest.approx([2, 0.5, 2, 0.5])
    assert found.clipped.tolist() == [True, False, False, True]
    # d(-ρ A)/d log p = -ρ A where it is not clipped, 0 where it is.
    assert gradient(log_probs, old, wide(1, 1, -1, -1), [4], **BOUNDS) == pytest.approx([0, -0.5, 2.0, 0])


def test_clip_high_lets_likelier_tokens_go_further() -> None:
    log_probs = wide(math.log(1.25))
    low = policy_terms(log_probs, wide(0), wide(1), [1], clip_low=0.2, clip_high=0.2)
    high = policy_terms(log_probs, wide(0), wide(1), [1], clip_low=0.2, clip_high=0.28)
    assert (float(low.losses), float(high.losses)) == pytest.approx((-1.2, -1.25))
    assert (bool(low.clipped), bool(high.clipped)) == (True, False)


def test_the_sequence_ratio_is_the_mean_and_its_gradient_reaches_all_tokens() -> None:
    """log s = (log 2 + log 8) / 2 = log 4 for the first; one token with 1/2 for the second."""
    log_probs, old = wide(LOG2, 3 * LOG2, -LOG2), wide(0, 0, 0)
    options: dict[str, Any] = {"ratio": "sequence", "clip_low": 0.9, "clip_high": 9.0}
    found = policy_terms(log_probs, old, wide(1, 1, -2), [2, 1], **options)
    assert found.ratios.tolist() == pytest.approx([4, 4, 0.5])
    assert found.losses.tolist() == pytest.approx([-4, -4, 1])
    # Both terms of the first hold s; each token moves log s by half: 2 terms × -4 × 1/2.
    assert gradient(log_probs, old, wide(1, 1, -2), [2, 1], **options) == pytest.approx([-4, -4, 1])


def test_the_sequence_ratio_is_clipped_as_a_whole() -> None:
    log_probs, old = wide(0.001, 0.0), wide(0, 0)
    found = policy_terms(log_probs, old, wide(1, 1), [2], ratio="sequence", clip_low=3e-4, clip_high=4e-4)
    assert found.losses.tolist() == pytest.approx([-1.0004, -1.0004], abs=1e-12)
    options: dict[str, Any] = {"ratio": "sequence", "clip_low": 3e-4, "clip_high": 4e-4}
    assert gradient(log_probs, old, wide(1, 1), [2], **options) == [0, 0]


def test_cispo_bounds_the_weight_and_keeps_every_gradient() -> None:
    """Ratios 2 (bounded to 1.5) and 1/2; the gradient is -weight × advantage."""
    log_probs, old = wide(LOG2, -LOG2), wide(0, 0)
    options: dict[str, Any] = {"ratio": "detached", "clip_low": 1.0, "clip_high": 0.5}
    found = policy_terms(log_probs, old, wide(1, -1), [2], **options)
    assert found.losses.tolist() == pytest.approx([-1.5 * LOG2, -0.5 * LOG2])
    assert found.clipped.tolist() == [True, False]
    assert gradient(log_probs, old, wide(1, -1), [2], **options) == pytest.approx([-1.5, 0.5])


@pytest.mark.parametrize("ratio", ["token", "sequence", "detached"])
def test_at_the_old_policy_every_ratio_is_one_and_the_gradient_is_reinforce(ratio: Ratio) -> None:
    log_probs, advantages = wide(-1, -2, -3), wide(0.5, 0.5, -2)
    found = policy_terms(log_probs, log_probs, advantages, [2, 1], ratio=ratio, **BOUNDS)
    assert found.ratios.tolist() == [1, 1, 1]
    assert not found.clipped.any()
    assert gradient(log_probs, log_probs, advantages, [2, 1], ratio=ratio, **BOUNDS) == pytest.approx([-0.5, -0.5, 2])


@pytest.mark.parametrize("ratio", ["token", "sequence"])
def test_gradients_are_those_of_finite_differences(ratio: Ratio) -> None:
    generator = torch.Generator().manual_seed(0)
    log_probs = torch.randn(9, generator=generator, dtype=torch.float64) - 2
    old = log_probs + 0.3 * torch.randn(9, generator=generator, dtype=torch.float64)
    advantages = torch.tensor([1.0, 1, 1, 1, -2, -2, -2, 0.5, 0.5], dtype=torch.float64)

    def loss(values: Tensor) -> float:
        return float(policy_terms(values, old, advantages, [4, 3, 2], ratio=ratio, **BOUNDS).losses.sum())

    found, size = gradient(log_probs, old, advantages, [4, 3, 2], ratio=ratio, **BOUNDS), 1e-6
    for n in range(9):
        step = torch.zeros(9, dtype=torch.float64)
        step[n] = size
        assert found[n] == pytest.approx((loss(log_probs + step) - loss(log_probs - step)) / (2 * size), abs=1e-8)


def test_a_zero_advantage_gives_exactly_zero() -> None:
    for ratio in ("token", "sequence", "detached"):
        assert gradient(wide(-1, -5), wide(-2, -1), wide(0, 0), [2], ratio=ratio, **BOUNDS) == [0, 0]


@pytest.mark.parametrize(("normalization", "expected"), [("sequence", 0.0), ("token", -0.6), ("constant", -0.3)])
def test_c06_three_normalizations_three_values(normalization: Normalization, expected: float) -> None:
    """2 tokens with loss 1, 8 tokens with -1, at most 10: (1 - 1) / 2; (2 - 8) / 10; (2 - 8) / (2 × 10)."""
    losses, counts = wide(*[1.0] * 2, *[-1.0] * 8), Counts(sequences=2, tokens=10, longest=10)
    assert float((token_weights([2, 8], normalization, counts) * losses).sum()) == pytest.approx(expected, abs=1e-12)
    # In two micro-batches the same: the denominators are those of the whole update.
    parts = [
        token_weights([2], normalization, counts) * losses[:2],
        token_weights([8], normalization, counts) * losses[2:],
    ]
    assert sum(float(part.sum()) for part in parts) == pytest.approx(expected, abs=1e-12)


def test_c08_numerator_and_denominator_are_of_the_same_set() -> None:
    """The second completion, of 6 tokens, is masked: it is in neither."""
    weights = token_weights([4], "token", Counts(sequences=1, tokens=4, longest=6))
    assert float((weights * torch.ones(4)).sum()) == 1.0
    with pytest.raises(ValueError, match="up to 1 sequences of 4 tokens"):
        token_weights([4, 6], "token", Counts(sequences=1, tokens=4, longest=6))


def test_c11_only_what_predicts_a_sampled_token_has_a_gradient() -> None:
    tokens, mask = trajectory([([1, 2], False), ([3, 4], True), ([5], False), ([6], True)])

    def loss_and_gradient(ids: list[int]) -> tuple[float, Tensor]:
        logits = torch.randn(6, 8, generator=torch.Generator().manual_seed(0), dtype=torch.float64).requires_grad_()
        scored = [t for t in range(1, 6) if mask[t]]
        log_probs = logits.log_softmax(-1)[[t - 1 for t in scored], [ids[t] for t in scored]]
        terms = policy_terms(log_probs, log_probs.detach(), wide(1, 1, 1), [3], **BOUNDS)
        terms.losses.sum().backward()
        assert logits.grad is not None
        return float(terms.losses.detach().sum()), logits.grad.abs().sum(-1)

    loss, found = loss_and_gradient(tokens)
    # Position t predicts token t + 1; the last predicts nothing.
    assert [bool(value) for value in found] == [False, True, True, False, True, False]
    assert loss_and_gradient([2, 1, 3, 4, 7, 6])[0] == loss


def test_importance_weights_by_hand() -> None:
    learner, sampler = wide(-1, -1, -1).requires_grad_(), wide(-1, -1 - math.log(3), -1 + LOG2)
    found = importance_weights(learner, sampler, 2.0)
    assert found.tolist() == pytest.approx([1, 2, 0.5])
    assert not found.requires_grad
    assert importance_weights(learner, sampler, None).tolist() == [1, 1, 1]


def test_wrong_shapes_are_refused() -> None:
    with pytest.raises(ValueError, match="lengths that sum to T"):
        policy_terms(wide(0, 0), wide(0, 0), wide(0), [2], **BOUNDS)
    with pytest.raises(ValueError, match="lengths of 3 tokens"):
        policy_terms(wide(0, 0), wide(0, 0), wide(0, 0), [3], **BOUNDS)
    with pytest.raises(ValueError, match="one shape"):
        importance_weights(wide(0, 0), wide(0), 1.0)
    with pytest.raises(ValueError, match="found 1 of 0 tokens"):
        token_weights([0], "token", Counts(1, 1, 1))
