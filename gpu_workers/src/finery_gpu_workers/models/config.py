"""What the decoder needs to know about a model, read from `config.json`; what is not understood is refused by name."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from finery_gpu_workers.errors import WorkerError

FAMILIES = ("llama", "mistral")

# Keys that change the computation, with the only values that this decoder computes. Absent counts as understood.
_UNDERSTOOD: dict[str, tuple[object, ...]] = {
    "hidden_act": ("silu",),
    "attention_bias": (False, None),
    "mlp_bias": (False, None),
    "sliding_window": (None,),
    "quantization_config": (None,),
    "partial_rotary_factor": (1, None),
    "pretraining_tp": (1, None),
    "embedding_multiplier": (1, None),
    "residual_multiplier": (1, None),
    "logits_scaling": (1, None),
    "attention_multiplier": (None,),
}


@dataclass(frozen=True)
class Llama3Scaling:
    """Llama 3.1's stretch of the low frequencies (`rope_type: llama3`)."""

    factor: float
    low_freq_factor: float
    high_freq_factor: float
    original_length: int


@dataclass(frozen=True)
class DecoderConfig:
    vocab: int
    hidden: int
    intermediate: int
    layers: int
    heads: int
    kv_heads: int
    head_dim: int
    norm_eps: float
    rope_theta: float
    rope_scaling: Llama3Scaling | None
    tied: bool
    """The output matrix is the embedding matrix."""


def read_config(folder: Path) -> DecoderConfig:
    """Raises WorkerError `unsupported_model` naming the key, or `model_requires_remote_code`."""
    raw = read_json(folder / "config.json")
    if raw.get("model_type") not in FAMILIES:
        raise _unsupported("model_type", raw.get("model_type"), FAMILIES)
    for key, understood in _UNDERSTOOD.items():
        if raw.get(key, understood[0]) not in understood:
            raise _unsupported(key, raw[key], understood)
    return _parse(raw)


def read_json(path: Path) -> dict[str, Any]:
    """A JSON object of a model folder that names no Python code of its own."""
    try:
        raw = json.loads(path.read_text())
    except (OSError, ValueError) as error:
        raise WorkerError("invalid_model", f"expected a readable {path.name}, found: {error}") from error
    if not isinstance(raw, dict):
        raise WorkerError("invalid_model", f"{path.name}: expected a JSON object, found {type(raw).__name__}")
    if "auto_map" in raw:
        raise WorkerError(
            "model_requires_remote_code",
            f"{path.parent.name}: {path.name} has `auto_map`, so the model needs its own Python code, "
            "which is never run; use a model of a built-in architecture with a tokenizer.json",
        )
    return raw


def _parse(raw: Mapping[str, Any]) -> DecoderConfig:
    try:
        theta, scaling = _rope(raw)
        return DecoderConfig(
            vocab=raw["vocab_size"],
            hidden=raw["hidden_size"],
            intermediate=raw["intermediate_size"],
            layers=raw["num_hidden_layers"],
            heads=raw["num_attention_heads"],
            kv_heads=raw.get("num_key_value_heads") or raw["num_attention_heads"],
            head_dim=raw.get("head_dim") or raw["hidden_size"] // raw["num_attention_heads"],
            norm_eps=raw.get("rms_norm_eps", 1e-6),
            rope_theta=theta,
            rope_scaling=scaling,
            tied=bool(raw.get("tie_word_embeddings", False)),
        )
    except KeyError as error:
        raise WorkerError("invalid_model", f"config.json: expected the key {error}, found none") from error


def _rope(raw: Mapping[str, Any]) -> tuple[float, Llama3Scaling | None]:
    """`rope_parameters` (transformers 5) or `rope_theta` and `rope_scaling` (before)."""
    rope = raw.get("rope_parameters") or raw.get("rope_scaling") or {}
    theta = float(rope.get("rope_theta", raw.get("rope_theta", 10000.0)))
    kind = rope.get("rope_type", rope.get("type", "default"))
    if rope.get("partial_rotary_factor", 1) != 1:
        raise _unsupported("rope_parameters.partial_rotary_factor", rope["partial_rotary_factor"], (1,))
    if kind == "default":
        return theta, None
    if kind != "llama3":
        raise _unsupported("rope_parameters.rope_type", kind, ("default", "llama3"))
    return theta, Llama3Scaling(
        factor=rope["factor"],
        low_freq_factor=rope["low_freq_factor"],
        high_freq_factor=rope["high_freq_factor"],
        original_length=rope["original_max_position_embeddings"],
    )


def _unsupported(key: str, found: object, understood: tuple[object, ...]) -> WorkerError:
    expected = " or ".join(json.dumps(value) for value in understood)
    return WorkerError(
        "unsupported_model",
        f"config.json: `{key}`: expected {expected}, found {json.dumps(found)}; choose a model of the Llama shape",
    )
