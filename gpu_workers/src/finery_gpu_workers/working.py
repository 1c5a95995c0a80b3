"""Weights of the model itself that are trained: float32 masters, and the model's own tensors as working copies."""

from __future__ import annotations

from collections.abc import Iterable
from functools import partial

import torch
from torch import Tensor

from finery_gpu_workers.models.interface import Model
from finery_gpu_workers.optim import FlatParameters


class WorkingCopies:
    """Ties a model's tensors, in the compute dtype, to their masters of the same names in a `FlatParameters`.

    A gradient that autograd gives to a working copy is added to the master's, in float32, and freed at once.
    """

    def __init__(self, model: Model, parameters: FlatParameters, names: Iterable[str]) -> None:
        with torch.no_grad():
            weights = dict(model.named_weights())
        self._pairs = [(parameters.views[name], weights[name]) for name in names]
        stacks: dict[int, tuple[Tensor, list[tuple[Tensor, Tensor]]]] = {}
        for master, weight in self._pairs:
            # Layers that are stacked into one matrix are views of it: the matrix is what autograd sees.
            leaf = weight if weight._base is None else weight._base
            assert master.grad is not None
            stacks.setdefault(id(leaf), (leaf, []))[1].append((weight, master.grad))
        for leaf, parts in stacks.values():
            leaf.requires_grad_().register_post_accumulate_grad_hook(partial(_collect, parts))
        self.refresh()

    @torch.no_grad()
    def refresh(self) -> None:
        """Rounds the masters into the working copies."""
        for master, weight in self._pairs:
            weight.copy_(master)


def _collect(parts: list[tuple[Tensor, Tensor]], leaf: Tensor) -> None:
    assert leaf.grad is not None
    for weight, gradient in parts:
        first = (weight.storage_offset() - leaf.storage_offset()) // leaf.stride(0)
        gradient.add_(leaf.grad[first : first + len(weight)])
    leaf.grad = None
