"""Losses: pure, shape-checked; every loss names its numerator, and the caller divides by a global count."""

from __future__ import annotations

from dataclasses import dataclass

import torch.nn.functional as F
from torch import Tensor


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
    losses = F.cross_entropy(logits.float(), targets, reduction="none")
    return SumCount(numerator=(losses * weights).sum(), tokens=int((weights > 0).sum()))
