"""What the decoder needs to know about a model, read from `config.json`; what is not understood is refused by name."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from finery_gpu_workers.errors import WorkerError
from finery_gpu_workers.models.scaling import KINDS, Rope, Scaling, read_rope

FAMILIES = ("llama", "mistral", "qwen2", "qwen3")

# Keys that change the computation, with the only values that this decoder computes. Absent counts as understood.
_UNDERSTOOD: dict[str, tuple[object, ...]] = {
    "hidden_act": ("silu",),
    "quantization_config": (None,),
    "pretraining_tp": (1, None),
    "embedding_multiplier": (1, None),
    "residual_multiplier": (1, None),
    "logits_scaling": (1, None),
    "attention_multiplier": (None,),
}
_NO_BIAS = (False, None)
# What transformers computes with when the key is absent, where that differs between the families.
_KV_HEADS = {"mistral": 8, "qwen2": 32, "qwen3": 32}
_LONGEST = {"llama": 2048, "mistral": 131072, "qwen2": 32768, "qwen3": 32768}
_WINDOW = 4096


@dataclass(frozen=True)
class DecoderConfig:
    family: str
    vocab: int
    hidden: int
    intermediate: int
    layers: int
    heads: int
    kv_heads: int
    head_dim: int
    norm_eps: float
    rope_theta: float
    rope_scaling: Scaling | None
    tied: bool
    """The output matrix is the embedding matrix."""
    qkv_bias: bool
    o_bias: bool
    mlp_bias: bool
    qk_norm: bool
    """Every head of queries and keys is normed before the rotation."""
    longest_row: int | None
    """Tokens. Beyond it the model would compute something else: a sliding window, other frequencies."""


def read_config(folder: Path) -> DecoderConfig:
    """Raises WorkerError `unsupported_model` naming the key, `invalid_model`, or `model_requires_remote_code`."""
    raw = read_json(folder / "config.json")
    if raw.get("model_type") not in FAMILIES:
        raise _unsupported("model_type", raw.get("model_type"), FAMILIES)
    for key, understood in _UNDERSTOOD.items():
        if raw.get(key, understood[0]) not in understood:
            raise _unsupported(key, raw[key], understood)
    try:
        return _parse(raw)
    except KeyError as error:
        raise WorkerError("invalid_model", f"config.json: expected the key {error}, found none") from error
    except (TypeError, ValueError, AttributeError, ZeroDivisionError) as error:
        raise WorkerError("invalid_model", f"config.json: a value is not of the kind it must be: {error}") from error


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
            f"{path.name} has `auto_map`, so the model needs its own Python code, "
            "which is never run; use a model of a built-in architecture with a tokenizer.json",
        )
    return raw


def _parse(raw: Mapping[str, Any]) -> DecoderConfig:
    family, rope = raw["model_type"], _rope(raw)
    heads = raw["num_attention_heads"]
    head_dim = raw.get("head_dim") or (128 if family == "qwen3" else raw["hidden_size"] // heads)
    attention_bias, mlp_bias = _biases(raw)
    return DecoderConfig(
        family=family,
        vocab=raw["vocab_size"],
        hidden=raw["hidden_size"],
        intermediate=raw["intermediate_size"],
        layers=raw["num_hidden_layers"],
        heads=heads,
        kv_heads=raw.get("num_key_value_heads", _KV_HEADS.get(family)) or heads,
        head_dim=head_dim,
        norm_eps=raw.get("rms_norm_eps", 1e-6),
        rope_theta=rope.theta,
        rope_scaling=rope.scaling,
        tied=bool(raw.get("tie_word_embeddings", False)),
        qkv_bias=attention_bias or family == "qwen2",
        o_bias=attention_bias,
        mlp_bias=mlp_bias,
        qk_norm=family == "qwen3",
        longest_row=_longest_row(raw, rope),
    )


def _biases(raw: Mapping[str, Any]) -> tuple[bool, bool]:
    """(of all four attention layers, of the MLP's); a family that has no such switch is refused with it on."""
    switches = {"attention_bias": ("llama", "qwen3"), "mlp_bias": ("llama",)}
    for key, families in switches.items():
        # Qwen2 has its query, key and value biases whatever the key says.
        if raw["model_type"] not in (*families, "qwen2") and raw.get(key) not in _NO_BIAS:
            raise _unsupported(key, raw[key], _NO_BIAS)
    attention, mlp = (raw["model_type"] in families and bool(raw.get(key)) for key, families in switches.items())
    return attention, mlp


def _rope(raw: Mapping[str, Any]) -> Rope:
    rope = read_rope(raw)
    if rope.turning != 1:
        raise _unsupported("rope_parameters.partial_rotary_factor", rope.turning, (1,))
    if rope.kind not in KINDS:
        raise _unsupported("rope_parameters.rope_type", rope.kind, KINDS)
    return rope


def _longest_row(raw: Mapping[str, Any], rope: Rope) -> int | None:
    own = raw.get("max_position_embeddings", _LONGEST[raw["model_type"]])
    window = _window(raw)
    if window is not None and window < own:
        raise _unsupported("sliding_window", window, (None, f"at least max_position_embeddings, {own}"))
    return own if rope.kind == "dynamic" else window


def _window(raw: Mapping[str, Any]) -> int | None:
    """Keys that a query of some layer sees; None: all before it."""
    family = raw["model_type"]
    window: int | None = raw.get("sliding_window", None if family == "llama" else _WINDOW)
    kinds = raw.get("layer_types") or ()
    if unknown := set(kinds) - {"full_attention", "sliding_attention"}:
        raise _unsupported("layer_types", sorted(unknown)[0], ("full_attention", "sliding_attention"))
    if family in ("llama", "mistral"):
        return window
    slides = "sliding_attention" in kinds if kinds else raw.get("max_window_layers", 28) < raw["num_hidden_layers"]
    return window if raw.get("use_sliding_window") and slides else None


def _unsupported(key: str, found: object, understood: tuple[object, ...]) -> WorkerError:
    expected = " or ".join(json.dumps(value) for value in understood)
    return WorkerError("unsupported_model", f"config.json: `{key}`: expected {expected}, found {json.dumps(found)}")
