"""Losses: pure, shape-checked; every loss names its numerator, and the caller divides by a global count."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable


@dataclass(frozen=True)
class SumCount:
    numerator: Tensor
    """float32 scalar, differentiable: a weighted sum, never a mean, so that micro batches add up."""
    tokens: int
    """Positions with weight > 0."""


def cross_entropy(logits: Tensor, targets: Tensor, weights: Tensor) -> SumCount:
    """Sum over n of weights[n] × -log softmax(logits[n])[targets[n]], in float32.

    logits [N, V] of any float dtype, targets int64 [N], weights float32 [N]. Raises ValueError on other shapes.
    """
    if logits.ndim != 2 or targets.shape != logits.shape[:1] or weights.shape != logits.shape[:1]:
        found = f"{tuple(logits.shape)}, {tuple(targets.shape)}, {tuple(weights.shape)}"
        raise ValueError(f"expected logits [N, V], targets [N], weights [N], found {found}")
    numerator = _CrossEntropy.apply(logits, targets, weights)  # type: ignore[no-untyped-call]
    return SumCount(numerator=numerator, tokens=int((weights > 0).sum()))


class _CrossEntropy(torch.autograd.Function):
    """The gradient, weights[n] × (softmax(logits[n]) - onehot(targets[n])), is made while the softmax is at hand."""

    @staticmethod
    def forward(ctx: Any, logits: Tensor, targets: Tensor, weights: Tensor) -> Tensor:
        wide = logits.to(torch.promote_types(logits.dtype, torch.float32))
        # -log p[target] = log sum exp - logit; the greatest p is at least 1 / V, so its logarithm is exact and finite.
        chances = torch.softmax(wide, dim=-1)
        total = wide.amax(-1) - chances.amax(-1).log()
        losses = total - wide.gather(1, targets[:, None])[:, 0]
        if ctx.needs_input_grad[0]:
            chosen = chances.gather(1, targets[:, None]) - 1
            ctx.save_for_backward(chances.scatter_(1, targets[:, None], chosen).mul_(weights[:, None]).to(logits.dtype))
        return (losses * weights).sum()

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, scale: Tensor) -> tuple[Tensor, None, None]:
        (gradient,) = ctx.saved_tensors
        # Not rounded to the dtype of the logits first: that would scale all gradients of a step by up to 0.4 %.
        return gradient * scale, None, None
