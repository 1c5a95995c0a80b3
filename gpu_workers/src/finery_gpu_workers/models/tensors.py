"""Tensors of a folder in the transformers layout. Safetensors only: nothing in it can run code."""

from __future__ import annotations

import json
from collections import Counter
from math import prod
from pathlib import Path

import torch
from safetensors import SafetensorError, safe_open
from torch import Tensor

from finery_gpu_workers.errors import WorkerError
from finery_gpu_workers.models.pickles import refuse_pickles

WHOLE, INDEX = "model.safetensors", "model.safetensors.index.json"
_DTYPES = {"F32": torch.float32, "BF16": torch.bfloat16, "F16": torch.float16, "F64": torch.float64}


def shards(folder: Path) -> dict[str, Path]:
    """Tensor name → file. Raises WorkerError `unsafe_checkpoint_file`, `invalid_model`."""
    refuse_pickles((path.name for path in folder.iterdir()), folder.name)
    paths = sorted(folder.glob("*.safetensors"))
    if (folder / WHOLE).exists():  # before an index, as transformers has it: that one is left from something else
        paths = [folder / WHOLE]
    elif (folder / INDEX).exists():
        names = json.loads((folder / INDEX).read_text())["weight_map"]
        paths = sorted({folder / Path(name).name for name in names.values()})
    if not paths:
        raise invalid(folder, "expected .safetensors files, found none")
    found: dict[str, Path] = {}
    for path in paths:
        try:
            with safe_open(path, framework="pt") as file:
                found |= dict.fromkeys(file.keys(), path)
        except (OSError, SafetensorError) as error:
            raise invalid(folder, f"{path.name} is not a readable safetensors file: {error}") from error
    return found


def stored_dtype(folder: Path) -> torch.dtype:
    """The type that most of the stored numbers have. Raises WorkerError `unsupported_model` for packed integers."""
    numbers: Counter[str] = Counter()
    for path in sorted(set(shards(folder).values())):
        with safe_open(path, framework="pt") as file:
            for name in file.keys():  # noqa: SIM118
                part = file.get_slice(name)
                numbers[part.get_dtype()] += prod(part.get_shape())
    kind = numbers.most_common(1)[0][0] if numbers else "none"
    if kind not in _DTYPES:
        message = f"expected weights in {', '.join(_DTYPES)}, found {kind}; use the model unquantised"
        raise WorkerError("unsupported_model", message)
    return _DTYPES[kind]


def read_tensors(folder: Path, device: str, dtype: torch.dtype) -> dict[str, Tensor]:
    """Every tensor of the folder, on `device` in `dtype`."""
    tensors: dict[str, Tensor] = {}
    for path in sorted(set(shards(folder).values())):
        with safe_open(path, framework="pt", device=device) as file:
            # A copy: a memory-mapped tensor would change or fault when the file does.
            tensors |= {name: file.get_tensor(name).to(dtype, copy=True) for name in file.keys()}  # noqa: SIM118
    return tensors


def invalid(folder: Path, what: str) -> WorkerError:
    return WorkerError("invalid_model", f"{folder.name}: {what}")
