"""Adapters merged into weights, and vocabularies that grow."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

import torch
from torch import Tensor

from finery_gpu_workers.errors import WorkerError
from finery_gpu_workers.models.peft_layout import Stored, read_stored


def merged(weight: Tensor, down: Tensor, up: Tensor, scale: float) -> Tensor:
    """round(W + scale · B A): the product and the sum in float32, rounded once to the weight's dtype.

    weight [out, in], down (A) [rank, in], up (B) [out, rank].
    """
    return (weight.float() + scale * (up.float() @ down.float())).to(weight.dtype)


@torch.no_grad()
def merge(weights: dict[str, Tensor], folder: Path, *, embedding: str, head: str) -> None:
    """Merges the adapter in `folder` into `weights`, which are named as in transformers; `head` absent means tied.

    A matrix that the adapter trained whole replaces the model's; an output matrix of its own unties a tied model.
    Raises WorkerError `adapter_mismatch` where the adapter fits another model.
    """
    stored = read_stored(folder)
    old = weights[embedding]
    if embedding in stored.weights and head not in weights and not stored.tied:
        weights[head] = old  # as PEFT does: only the input matrix was trained
    for name in sorted(stored.weights):
        if name in (embedding, head):
            # A copy: what safetensors gives is a view of the file's bytes, which cannot be trained.
            weights[name] = stored.weights[name].to(old.device, old.dtype, copy=True)
        elif name.endswith(".lora_A"):
            _merge_one(weights, stored, name.removesuffix(".lora_A"), folder)
        elif not name.endswith(".lora_B") or name.removesuffix("B") + "A" not in stored.weights:
            raise _mismatch(folder, f"expected pairs of lora_A and lora_B, found `{name}`")
    shapes = {name: tuple(weights[name].shape) for name in (embedding, head) if name in weights}
    if len(set(shapes.values())) > 1:
        raise _mismatch(folder, f"expected input and output matrices of one shape, found {shapes}")


def _merge_one(weights: dict[str, Tensor], stored: Stored, module: str, folder: Path) -> None:
    weight = weights.get(f"{module}.weight")
    down, up = stored.weights[f"{module}.lora_A"], stored.weights.get(f"{module}.lora_B")
    if weight is None:
        raise _mismatch(folder, f"`{module}` is no linear layer of this model")
    rank = stored.adapter.rank
    expected = {"lora_A": (rank, weight.shape[1]), "lora_B": (weight.shape[0], rank)}
    found = {"lora_A": tuple(down.shape), "lora_B": None if up is None else tuple(up.shape)}
    if up is None or expected != found:
        raise _mismatch(folder, f"`{module}`: expected shapes {expected}, found {found}")
    scale = stored.adapter.alpha / rank
    weights[f"{module}.weight"] = merged(weight, down.to(weight.device), up.to(weight.device), scale)


@torch.no_grad()
def grow(weights: dict[str, Tensor], rows: int, names: Sequence[str]) -> None:
    """Appends `rows` rows to each matrix of `names` that is there: the mean of all its rows, in float32, rounded."""
    for name in names:
        if rows and name in weights:
            matrix = weights[name]
            mean = matrix.float().mean(dim=0, keepdim=True).to(matrix.dtype)
            weights[name] = torch.cat((matrix, mean.expand(rows, -1)))


def _mismatch(folder: Path, what: str) -> WorkerError:
    return WorkerError("adapter_mismatch", f"{folder.name}: {what}")
