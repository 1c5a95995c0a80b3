"""Adapters in the layout that PEFT and vLLM read: adapter_config.json and adapter_model.safetensors.

Matrices of `modules_to_save` lie whole next to the low-rank ones, as PEFT writes them:
`base_model.model.model.embed_tokens.weight`, `base_model.model.lm_head.weight`.
"""

from __future__ import annotations

import json
from dataclasses import dataclass
from pathlib import Path
from typing import Any, get_args

import torch
from pydantic import ValidationError
from safetensors import SafetensorError
from safetensors.torch import load_file, save_file
from torch import Tensor

from finery.types.methods import LinearName, LoraAdapter
from finery_gpu_workers.errors import WorkerError
from finery_gpu_workers.models.lora import Lora
from finery_gpu_workers.models.pickles import refuse_pickles
from finery_gpu_workers.models.targets import SAVED

CONFIG, WEIGHTS = "adapter_config.json", "adapter_model.safetensors"
_PREFIX = "base_model.model."
_LOW_RANK = (".lora_A", ".lora_B")

# Keys that change the computation, with the values that mean plain LoRA. Absent counts as plain.
_PLAIN: dict[str, tuple[object, ...]] = {
    "peft_type": ("LORA",),
    "bias": ("none",),
    "use_dora": (False, None),
    "use_rslora": (False, None),
    "fan_in_fan_out": (False, None),
    "rank_pattern": ({}, None),
    "alpha_pattern": ({}, None),
    "layers_to_transform": (None,),
    "trainable_token_indices": (None,),
    "target_parameters": (None, []),
    "exclude_modules": (None, []),
    "lora_bias": (False, None),
}


@dataclass(frozen=True)
class Stored:
    """An adapter in a folder."""

    adapter: LoraAdapter
    tied: bool
    """A saved embedding is the output matrix, too (`ensure_weight_tying` of PEFT); it is in `weights` once."""
    weights: dict[str, Tensor]
    """float32, under the names of `Lora.parameters`."""


def export_peft(lora: Lora, folder: Path, *, base_model: str) -> None:
    """Writes the two files; `base_model` is the name that PEFT shows as base_model_name_or_path."""
    folder.mkdir(parents=True, exist_ok=True)
    adapter, views = lora.adapter, lora.parameters.views
    saved = list(dict.fromkeys(adapter.modules_to_save))
    weights = {_key(name): view.detach().cpu().clone() for name, view in views.items()}
    both = lora.tied and bool(saved)
    if both:
        # Without the second copy PEFT would leave the output matrix as it was.
        saved = ["embed_tokens", "lm_head"]
        weights[_key(SAVED["lm_head"])] = weights[_key(SAVED["embed_tokens"])].clone()
    config: dict[str, Any] = {
        "peft_type": "LORA",
        "task_type": "CAUSAL_LM",
        "base_model_name_or_path": base_model,
        "r": adapter.rank,
        "lora_alpha": int(adapter.alpha) if adapter.alpha.is_integer() else adapter.alpha,
        "lora_dropout": 0.0,
        "bias": "none",
        "target_modules": sorted({n.split(".")[-2] for n in views if n.endswith(_LOW_RANK)}),
        "fan_in_fan_out": False,
        "inference_mode": True,
        "init_lora_weights": True,
        "modules_to_save": saved or None,
        "ensure_weight_tying": both,
        "use_dora": False,
        "use_rslora": False,
    }
    (folder / CONFIG).write_text(json.dumps(config, indent=2) + "\n")
    save_file(weights, folder / WEIGHTS, metadata={"format": "pt"})


def read_stored(folder: Path) -> Stored:
    """An exported adapter. Raises WorkerError `unsupported_adapter` naming the key, `invalid_adapter`,
    `unsafe_checkpoint_file`, and `adapter_mismatch` for a key of another layout."""
    refuse_pickles((path.name for path in folder.iterdir()), folder.name)
    raw = _read_config(folder)
    try:
        stored = load_file(folder / WEIGHTS)
    except (OSError, SafetensorError) as error:
        raise WorkerError("invalid_adapter", f"{WEIGHTS} is not a readable safetensors file: {error}") from error
    if not stored:
        raise _mismatch("expected the tensors of an adapter, found an empty file")
    weights = {_name(key): tensor.float() for key, tensor in stored.items()}
    embedding, head = (weights.get(SAVED[name]) for name in ("embed_tokens", "lm_head"))
    tied = bool(raw.get("ensure_weight_tying")) and embedding is not None
    if tied and head is not None and embedding is not None:
        if not torch.equal(head, embedding):
            raise _mismatch(f"expected `{SAVED['lm_head']}` to equal the embedding that it is tied to")
        del weights[SAVED["lm_head"]]
    return Stored(_adapter(raw, tied=tied), tied, weights)


def load_peft(lora: Lora, folder: Path) -> None:
    """Overwrites the adapter's weights. Every tensor of the file must fit one of ours, and all of ours be there."""
    stored = read_stored(folder)
    expected, found = (
        f"rank {a.rank}, alpha {a.alpha} and modules_to_save {sorted(set(a.modules_to_save))}"
        for a in (lora.adapter, stored.adapter)
    )
    if expected != found:
        raise _mismatch(f"expected {expected}, found {found}")
    _copy(lora.parameters.views, stored.weights)
    lora.refresh()


def servable(adapter: LoraAdapter, *, own_base: bool = False) -> dict[str, Any]:
    """Facts for the manifest: whether servers (vLLM) can put the adapter on the catalogue's model.

    `own_base`: the job's base is not the catalogue's model itself, but has checkpoints merged into it.
    """
    reason = None
    if adapter.modules_to_save:
        reason = f"modules_to_save=[{', '.join(dict.fromkeys(adapter.modules_to_save))}]"
    elif own_base:
        reason = "trained on a base with checkpoints merged into it"
    facts: dict[str, Any] = {"servable_as_adapter": reason is None, "max_rank_required": adapter.rank}
    return facts if reason is None else facts | {"reason": reason}


def _read_config(folder: Path) -> dict[str, Any]:
    try:
        raw = json.loads((folder / CONFIG).read_text())
    except (OSError, ValueError) as error:
        raise WorkerError("invalid_adapter", f"expected a readable {CONFIG}, found: {error}") from error
    if not isinstance(raw, dict):
        raise WorkerError("invalid_adapter", f"{CONFIG}: expected a JSON object, found {type(raw).__name__}")
    for key, plain in _PLAIN.items():
        if raw.get(key, plain[0]) not in plain:
            expected = " or ".join(json.dumps(value) for value in plain)
            raise WorkerError("unsupported_adapter", f"{CONFIG}: `{key}`: expected {expected}, found {raw[key]!r}")
    return raw


def _saved(raw: dict[str, Any]) -> list[str]:
    """PEFT writes paths as well as names."""
    return list(dict.fromkeys(name.rsplit(".", 1)[-1] for name in raw.get("modules_to_save") or ()))


def _adapter(raw: dict[str, Any], *, tied: bool) -> LoraAdapter:
    """Target names that no request can spell mean that all linear layers of such a model have an adapter."""
    targets = raw.get("target_modules")
    names = set(get_args(LinearName))
    everything = targets == "all-linear"
    if isinstance(targets, list):
        everything = set(targets) >= names or bool(set(targets) - names)
    shape = {
        "rank": raw.get("r"),
        "alpha": raw.get("lora_alpha"),
        "targets": "all-linear" if everything else targets,
        "modules_to_save": [name for name in _saved(raw) if not (tied and name == "lm_head")],
    }
    try:
        return LoraAdapter.model_validate(shape)
    except ValidationError as error:
        raise WorkerError("unsupported_adapter", f"{CONFIG}: {error}") from error


def _copy(views: dict[str, Tensor], weights: dict[str, Tensor]) -> None:
    unmatched = sorted(weights.keys() - views.keys())
    if unmatched:
        raise _mismatch(
            f"`{_key(unmatched[0])}` fits no module of this model; expected keys like `{_key(min(views))}` "
            f"({len(unmatched)} of {len(weights)} keys do not fit)"
        )
    missing = sorted(views.keys() - weights.keys())
    if missing:
        first = f"the first missing one is `{_key(missing[0])}`"
        raise _mismatch(f"expected {len(views)} tensors, found {len(weights)}; {first}")
    for name, view in views.items():
        if weights[name].shape != view.shape:
            shapes = f"expected shape {tuple(view.shape)}, found {tuple(weights[name].shape)}"
            raise _mismatch(f"`{_key(name)}`: {shapes}")
    for name, view in views.items():
        view.detach().copy_(weights[name])


def _key(name: str) -> str:
    """Of a parameter's name: only low-rank ones lack `.weight` there."""
    return f"{_PREFIX}{name}.weight" if name.endswith(_LOW_RANK) else f"{_PREFIX}{name}"


def _name(key: str) -> str:
    if not key.startswith(_PREFIX):
        raise _mismatch(f"expected keys that begin with `{_PREFIX}`, found `{key}`")
    name = key.removeprefix(_PREFIX)
    bare = name.removesuffix(".weight")
    return bare if bare.endswith(_LOW_RANK) else name


def _mismatch(what: str) -> WorkerError:
    return WorkerError("adapter_mismatch", f"{WEIGHTS}: {what}")
