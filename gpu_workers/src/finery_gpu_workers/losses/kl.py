"""The divergence of the policy from a reference, estimated from the tokens that were sampled."""

from __future__ import annotations

from typing import Literal

import torch
from torch import Tensor

Estimator = Literal["k1", "k2", "k3"]


def kl_estimate(log_probs: Tensor, reference: Tensor, estimator: Estimator) -> Tensor:
    """Per-token estimates of KL(policy ‖ reference) (Schulman 2020, joschu.net/blog/kl-approx.html), [T].

    With p, r the probabilities that policy and reference give to the sampled token,

        k1 = log p - log r              no bias; may be negative
        k2 = (log p - log r)² / 2       little variance, some bias
        k3 = r/p - 1 + log p - log r    no bias, never negative

    As a loss each has its own gradient, times ∇ log p:

        k2   log p - log r      whose mean over the policy's samples is the gradient of KL(policy ‖ reference)
        k1   the same. Differentiated as it stands it would give 1, whose mean is 0: no pull at all. So its value is
             k1 and its gradient that of the divergence which it estimates.
        k3   1 - r/p            as GRPO has it; its mean is the gradient of KL(reference ‖ policy), the other way round

    See Tang & Munos 2025 (arXiv:2506.09477) on both. All pull log p towards log r, whatever the advantage.

    log_probs, reference float [T]; the reference has no gradient. Raises ValueError on other shapes.
    """
    if log_probs.ndim != 1 or reference.shape != log_probs.shape:
        found = f"{tuple(log_probs.shape)} and {tuple(reference.shape)}"
        raise ValueError(f"expected log_probs and reference of one shape [T], found {found}")
    apart = log_probs - reference.detach()
    if estimator == "k1":
        value = apart.detach()
        return value + value * (log_probs - log_probs.detach())
    if estimator == "k2":
        return apart.square() / 2
    return torch.expm1(-apart) + apart


def kl_reward(log_probs: Tensor, reference: Tensor, estimator: Estimator, lengths: list[int]) -> list[float]:
    """The estimate as a part of the reward: detached and summed over each sequence's tokens, [sequences].

    β times it is taken off the reward before rollouts are compared, so that its gradient is the policy's own (score
    function): with k1 it is that of KL(policy ‖ reference) over whole answers (Ouyang et al. 2022, arXiv:2203.02155).

    log_probs, reference float [T], sequences end to end; lengths [sequences], which sum to T.
    """
    if sum(lengths) != len(log_probs):
        raise ValueError(f"lengths: expected a sum of {len(log_probs)} tokens, found {sum(lengths)}")
    values = kl_estimate(log_probs.detach(), reference, estimator).double()
    return [float(part.sum()) for part in values.split(lengths)]
