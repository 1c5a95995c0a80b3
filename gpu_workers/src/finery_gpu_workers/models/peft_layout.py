"""Adapters in the layout that PEFT and vLLM read: adapter_config.json and adapter_model.safetensors."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any, get_args

from pydantic import ValidationError
from safetensors import SafetensorError
from safetensors.torch import load_file, save_file
from torch import Tensor

from finery.types.methods import LinearName, LoraAdapter
from finery_gpu_workers.errors import WorkerError
from finery_gpu_workers.models.lora import Lora
from finery_gpu_workers.models.pickles import refuse_pickles

CONFIG, WEIGHTS = "adapter_config.json", "adapter_model.safetensors"
_PREFIX = "base_model.model."

# Keys that change the computation, with the values that mean plain LoRA. Absent counts as plain.
_PLAIN: dict[str, tuple[object, ...]] = {
    "peft_type": ("LORA",),
    "bias": ("none",),
    "use_dora": (False, None),
    "use_rslora": (False, None),
    "fan_in_fan_out": (False, None),
    "modules_to_save": (None, []),
    "rank_pattern": ({}, None),
    "alpha_pattern": ({}, None),
    "layers_to_transform": (None,),
    "trainable_token_indices": (None,),
}


def export_peft(lora: Lora, folder: Path, *, base_model: str) -> None:
    """Writes the two files; `base_model` is the name that PEFT shows as base_model_name_or_path."""
    folder.mkdir(parents=True, exist_ok=True)
    adapter = lora.adapter
    config: dict[str, Any] = {
        "peft_type": "LORA",
        "task_type": "CAUSAL_LM",
        "base_model_name_or_path": base_model,
        "r": adapter.rank,
        "lora_alpha": int(adapter.alpha) if adapter.alpha.is_integer() else adapter.alpha,
        "lora_dropout": 0.0,
        "bias": "none",
        "target_modules": sorted(get_args(LinearName) if adapter.targets == "all-linear" else set(adapter.targets)),
        "fan_in_fan_out": False,
        "inference_mode": True,
        "init_lora_weights": True,
        "modules_to_save": None,
        "use_dora": False,
        "use_rslora": False,
    }
    (folder / CONFIG).write_text(json.dumps(config, indent=2) + "\n")
    weights = {_key(name): view.detach().cpu().clone() for name, view in lora.parameters.views.items()}
    save_file(weights, folder / WEIGHTS, metadata={"format": "pt"})


def read_adapter(folder: Path) -> LoraAdapter:
    """The rank, alpha and targets of an exported adapter. Raises WorkerError `unsupported_adapter` naming the key."""
    try:
        raw = json.loads((folder / CONFIG).read_text())
    except (OSError, ValueError) as error:
        raise WorkerError("invalid_adapter", f"expected a readable {CONFIG}, found: {error}") from error
    for key, plain in _PLAIN.items():
        if raw.get(key, plain[0]) not in plain:
            expected = " or ".join(json.dumps(value) for value in plain)
            raise WorkerError("unsupported_adapter", f"{CONFIG}: `{key}`: expected {expected}, found {raw[key]!r}")
    targets = raw.get("target_modules")
    everything = targets == "all-linear" or (isinstance(targets, list) and set(targets) == set(get_args(LinearName)))
    try:
        return LoraAdapter(
            rank=raw.get("r"),
            alpha=float(raw.get("lora_alpha", 0)),
            targets="all-linear" if everything else targets,
        )
    except (ValidationError, TypeError, ValueError) as error:
        raise WorkerError("unsupported_adapter", f"{CONFIG}: {error}") from error


def load_peft(lora: Lora, folder: Path) -> None:
    """Overwrites the adapter's weights. Every tensor of the file must fit one of ours, and all of ours be there."""
    refuse_pickles((path.name for path in folder.iterdir()), folder.name)
    stored = read_adapter(folder)
    if (stored.rank, stored.alpha) != (lora.adapter.rank, lora.adapter.alpha):
        expected = f"rank {lora.adapter.rank} and alpha {lora.adapter.alpha}"
        raise _mismatch(f"expected {expected}, found rank {stored.rank} and alpha {stored.alpha}")
    try:
        weights = load_file(folder / WEIGHTS)
    except (OSError, SafetensorError) as error:
        raise WorkerError("invalid_adapter", f"{WEIGHTS} is not a readable safetensors file: {error}") from error
    _copy(lora, weights)


def _copy(lora: Lora, weights: dict[str, Tensor]) -> None:
    views = {_key(name): view for name, view in lora.parameters.views.items()}
    if not weights:
        raise _mismatch(f"expected adapters of {len(views) // 2} modules, found an empty file")
    unmatched = sorted(weights.keys() - views.keys())
    if unmatched:
        raise _mismatch(
            f"`{unmatched[0]}` fits no module of this model; expected keys like `{min(views)}` "
            f"({len(unmatched)} of {len(weights)} keys do not fit)"
        )
    missing = sorted(views.keys() - weights.keys())
    if missing:
        raise _mismatch(f"expected {len(views)} tensors, found {len(weights)}; the first missing one is `{missing[0]}`")
    for key, view in views.items():
        if weights[key].shape != view.shape:
            raise _mismatch(f"`{key}`: expected shape {tuple(view.shape)}, found {tuple(weights[key].shape)}")
    for key, view in views.items():
        view.detach().copy_(weights[key])


def _key(name: str) -> str:
    return f"{_PREFIX}{name}.weight"


def _mismatch(what: str) -> WorkerError:
    return WorkerError("adapter_mismatch", f"{WEIGHTS}: {what}")
