"""A whole model in the transformers layout: config.json and safetensors, with nothing of the adapter left."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save_file
from torch import Tensor

from finery_gpu_workers.models.config import read_json
from finery_gpu_workers.models.interface import Model
from finery_gpu_workers.models.lora import Lora
from finery_gpu_workers.models.merge import merged
from finery_gpu_workers.models.tensors import INDEX

SHARD_BYTES = 5 * 10**9
"""Weights of more than this go into several files with an index."""
# Of the model that this one came from, not of this one.
_LEFTOVERS = ("_name_or_path", "quantization_config", "auto_map")

Stored = Callable[[str, Tensor], Tensor]


def export_full(model: Model, source: Path, folder: Path, *, shard_bytes: int = SHARD_BYTES) -> int:
    """Writes the model as it is, in its dtype; returns the number of parameters stored.

    `source` is the folder that the model was loaded from: its config.json is kept, but for the size of the
    vocabulary, the tie of the output matrix and the dtype, which are the model's.
    """
    return _export(model, lambda _, weight: weight, source, folder, shard_bytes)


def export_merged(model: Model, lora: Lora, source: Path, folder: Path, *, shard_bytes: int = SHARD_BYTES) -> int:
    """The same with the adapter merged in: round(W + scale · B A), computed in float32. The model stays as it is."""
    views, scale = lora.parameters.views, lora.adapter.alpha / lora.adapter.rank

    def stored(name: str, weight: Tensor) -> Tensor:
        module = name.removesuffix(".weight")
        down, up = views.get(f"{module}.lora_A"), views.get(f"{module}.lora_B")
        return weight if down is None or up is None else merged(weight, down, up, scale)

    return _export(model, stored, source, folder, shard_bytes)


@torch.no_grad()
def _export(model: Model, stored: Stored, source: Path, folder: Path, shard_bytes: int) -> int:
    folder.mkdir(parents=True, exist_ok=True)
    weights = dict(model.named_weights())
    (folder / "config.json").write_text(json.dumps(_config(model, source), indent=2) + "\n")
    shards = _shards({name: weight.nbytes for name, weight in weights.items()}, shard_bytes)
    names_in_files = {name: model.stored_name(name) for name in weights}
    files: dict[str, str] = {}
    for number, names in enumerate(shards, start=1):
        file = "model.safetensors" if len(shards) == 1 else f"model-{number:05}-of-{len(shards):05}.safetensors"
        # Copies: safetensors refuses tensors that share memory, as stacked layers do.
        part = {name: stored(name, weights[name]).detach().to("cpu", copy=True).contiguous() for name in names}
        part = {names_in_files[name]: tensor for name, tensor in part.items()}
        save_file(part, folder / file, metadata={"format": "pt"})
        files |= dict.fromkeys(part, file)
    if len(shards) > 1:
        total = sum(weight.nbytes for weight in weights.values())
        index = {"metadata": {"total_size": total}, "weight_map": files}
        (folder / INDEX).write_text(json.dumps(index, indent=2) + "\n")
    return sum(weight.numel() for weight in weights.values())


def _config(model: Model, source: Path) -> dict[str, Any]:
    raw = read_json(source / "config.json")
    kept = {key: value for key, value in raw.items() if key not in _LEFTOVERS}
    dtype = str(model.dtype).removeprefix("torch.")
    if "torch_dtype" in kept:  # its name before transformers 4.56, which readers of that time look for
        kept["torch_dtype"] = dtype
    return kept | {"vocab_size": model.vocab, "tie_word_embeddings": model.tied, "dtype": dtype}


def _shards(sizes: dict[str, int], limit: int) -> list[list[str]]:
    """Names in order, as many to a file as fit into `limit` bytes; a tensor larger than that has one of its own."""
    shards: list[list[str]] = [[]]
    filled = 0
    for name, size in sizes.items():
        if shards[-1] and filled + size > limit:
            shards.append([])
            filled = 0
        shards[-1].append(name)
        filled += size
    return shards
