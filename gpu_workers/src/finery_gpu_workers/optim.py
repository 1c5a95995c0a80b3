"""AdamW (Loshchilov & Hutter 2019, arXiv:1711.05101) over one flat float32 buffer: a step is few vector operations."""

from __future__ import annotations

import math
from collections.abc import Mapping

import torch
from torch import Tensor

BETA1, BETA2, EPSILON = 0.9, 0.999, 1e-8
# Numbers that are updated together: their five vectors stay in a core's cache.
_AT_ONCE = 2**16


class FlatParameters:
    """Named trainable tensors whose values lie end to end in one buffer, and their gradients in another.

    `views` are leaves of autograd; gradients accumulate into `gradients` in place. Matrices lie before vectors (norms
    and biases), in the order given otherwise, so that weight decay covers the first `matrices` numbers.
    """

    def __init__(self, initial: Mapping[str, Tensor], device: str | torch.device) -> None:
        total = sum(value.numel() for value in initial.values())
        self.matrices = sum(value.numel() for value in initial.values() if value.ndim >= 2)
        self.values = torch.zeros(total, dtype=torch.float32, device=device)
        self.gradients = torch.zeros_like(self.values)
        self.views: dict[str, Tensor] = {}
        start = 0
        for name, value in sorted(initial.items(), key=lambda item: item[1].ndim < 2):
            part = slice(start, start + value.numel())
            view = self.values[part].view(value.shape)
            view.copy_(value.detach())
            self.views[name] = view.detach().requires_grad_()
            self.views[name].grad = self.gradients[part].view(value.shape)
            start = part.stop

    def named(self, flat: Tensor) -> dict[str, Tensor]:
        """A buffer of the same layout, cut into tensors of the parameters' names and shapes."""
        parts = flat.split([view.numel() for view in self.views.values()])
        return {name: part.view(view.shape) for (name, view), part in zip(self.views.items(), parts, strict=True)}


class AdamW:
    """Decoupled weight decay; the formula and the constants of torch.optim.AdamW.

    Only the first `decayed` numbers decay (None: all do). Matrices do, low-rank ones and embeddings too; norms and
    biases do not: pulled towards zero, they would scale activations down instead of keeping weights small.
    """

    def __init__(self, values: Tensor, weight_decay: float, decayed: int | None = None) -> None:
        self.weight_decay = weight_decay
        self.decayed = len(values) if decayed is None else decayed
        self.steps = 0
        self.mean = torch.zeros_like(values)
        self.square = torch.zeros_like(values)

    def step(self, values: Tensor, gradients: Tensor, learning_rate: float) -> None:
        """Changes `values` in place."""
        self.steps += 1
        values[: self.decayed].mul_(1 - learning_rate * self.weight_decay)
        rate, root = learning_rate / (1 - BETA1**self.steps), math.sqrt(1 - BETA2**self.steps)
        size = _AT_ONCE if values.device.type == "cpu" else len(values)
        parts = (flat.split(size) for flat in (values, gradients, self.mean, self.square))
        for value, gradient, mean, square in zip(*parts, strict=True):
            mean.lerp_(gradient, 1 - BETA1)
            square.mul_(BETA2).addcmul_(gradient, gradient, value=1 - BETA2)
            value.addcdiv_(mean, square.sqrt().div_(root).add_(EPSILON), value=-rate)


def clip(gradients: Tensor, max_norm: float | None) -> float:
    """Scales in place to a global L2 norm of at most `max_norm`; returns the norm found, which may not be finite."""
    norm = float(torch.linalg.vector_norm(gradients))
    if max_norm is not None and math.isfinite(norm) and norm > max_norm:
        gradients.mul_(max_norm / norm)
    return norm
