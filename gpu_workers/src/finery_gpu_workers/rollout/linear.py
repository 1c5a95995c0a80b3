"""Linear layers with their adapters, made ready for many calls on few tokens."""

from __future__ import annotations

from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor

from finery_gpu_workers.models.decoder import Projection
from finery_gpu_workers.models.lora import LoraDelta


@dataclass(frozen=True)
class Linear:
    """y = W x + b + B A x, where the scale is part of B; the weights are the model's own, not copied."""

    weight: Tensor
    bias: Tensor | None
    down: Tensor | None = None
    up: Tensor | None = None
    """Transposed."""

    @classmethod
    def of(cls, projection: Projection, dtype: torch.dtype) -> Linear:
        """As the projection computes now; a later change of its adapter is not seen."""
        delta = projection.delta
        if delta is None:
            return cls(projection.weight, projection.bias)
        if not isinstance(delta, LoraDelta):
            raise TypeError(f"expected an adapter of low rank, found {type(delta).__name__}")
        down, up = delta.stacked(dtype)
        return cls(projection.weight, projection.bias, down, up.t())

    def __call__(self, x: Tensor) -> Tensor:
        return self._adapted(F.linear(x, self.weight, self.bias), x)

    def onto(self, residual: Tensor, x: Tensor) -> None:
        """residual += y"""
        residual.addmm_(x, self.weight.t())
        if self.bias is not None:
            residual.add_(self.bias)
        self._adapted(residual, x)

    def _adapted(self, y: Tensor, x: Tensor) -> Tensor:
        if self.down is not None and self.up is not None:
            y.addmm_(F.linear(x, self.down), self.up)
        return y
