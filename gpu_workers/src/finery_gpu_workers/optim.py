"""AdamW (Loshchilov & Hutter 2019, arXiv:1711.05101) over one flat float32 buffer: a step is few vector operations."""

from __future__ import annotations

import math
from collections.abc import Mapping

import torch
from torch import Tensor

BETA1, BETA2, EPSILON = 0.9, 0.999, 1e-8


class FlatParameters:
    """Named trainable tensors whose values lie end to end in one buffer, and their gradients in another.

    `views` are leaves of autograd; gradients accumulate into `gradients` in place.
    """

    def __init__(self, initial: Mapping[str, Tensor], device: str | torch.device) -> None:
        total = sum(value.numel() for value in initial.values())
        self.values = torch.zeros(total, dtype=torch.float32, device=device)
        self.gradients = torch.zeros_like(self.values)
        self.views: dict[str, Tensor] = {}
        start = 0
        for name, value in initial.items():
            part = slice(start, start + value.numel())
            view = self.values[part].view(value.shape)
            view.copy_(value)
            self.views[name] = view.detach().requires_grad_()
            self.views[name].grad = self.gradients[part].view(value.shape)
            start = part.stop

    def named(self, flat: Tensor) -> dict[str, Tensor]:
        """A buffer of the same layout, cut into tensors of the parameters' names and shapes."""
        parts = flat.split([view.numel() for view in self.views.values()])
        return {name: part.view(view.shape) for (name, view), part in zip(self.views.items(), parts, strict=True)}


class AdamW:
    """Decoupled weight decay; the formula and the constants of torch.optim.AdamW."""

    def __init__(self, values: Tensor, weight_decay: float) -> None:
        self.weight_decay = weight_decay
        self.steps = 0
        self.mean = torch.zeros_like(values)
        self.square = torch.zeros_like(values)

    def step(self, values: Tensor, gradients: Tensor, learning_rate: float) -> None:
        """Changes `values` in place."""
        self.steps += 1
        self.mean.lerp_(gradients, 1 - BETA1)
        self.square.mul_(BETA2).addcmul_(gradients, gradients, value=1 - BETA2)
        spread = self.square.sqrt().div_(math.sqrt(1 - BETA2**self.steps)).add_(EPSILON)
        values.mul_(1 - learning_rate * self.weight_decay)
        values.addcdiv_(self.mean, spread, value=-learning_rate / (1 - BETA1**self.steps))


def clip(gradients: Tensor, max_norm: float | None) -> float:
    """Scales in place to a global L2 norm of at most `max_norm`; returns the norm found, which may not be finite."""
    norm = float(torch.linalg.vector_norm(gradients))
    if max_norm is not None and math.isfinite(norm) and norm > max_norm:
        gradients.mul_(max_norm / norm)
    return norm
