"""How a model's rotary frequencies are stretched for long rows, read from `config.json`."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any


@dataclass(frozen=True)
class LinearScaling:
    """Every position counts 1 / factor (Chen et al. 2023, arXiv:2306.15595)."""

    factor: float


@dataclass(frozen=True)
class Llama3Scaling:
    """Llama 3.1's stretch of the low frequencies (`rope_type: llama3`)."""

    factor: float
    low_freq_factor: float
    high_freq_factor: float
    original_length: int


@dataclass(frozen=True)
class YarnScaling:
    """YaRN (Peng et al. 2023, arXiv:2309.00071)."""

    factor: float
    original_length: int
    beta_fast: float
    """Frequencies that turn at least this often within the original length stay."""
    beta_slow: float
    """Those that turn at most this often are slowed by `factor`."""
    truncate: bool
    """The bounds between the two are rounded outwards to whole dimensions."""
    attention_factor: float
    """Cosine and sine are multiplied by it."""


Scaling = LinearScaling | Llama3Scaling | YarnScaling
KINDS = ("default", "linear", "dynamic", "llama3", "yarn")


@dataclass(frozen=True)
class Rope:
    theta: float
    kind: str
    """One of `KINDS` where this decoder can compute it; `dynamic` is `default` up to the model's own length."""
    scaling: Scaling | None
    turning: float = 1.0
    """Part of each head that is rotated."""


def read_rope(raw: Mapping[str, Any]) -> Rope:
    """`rope_parameters` (transformers 5) or `rope_theta` and `rope_scaling` (before). Raises KeyError, TypeError."""
    rope = raw.get("rope_parameters") or raw.get("rope_scaling") or {}
    kind = rope.get("rope_type", rope.get("type", "default"))
    return Rope(
        theta=float(rope.get("rope_theta", raw.get("rope_theta", 10000.0))),
        kind=kind,
        scaling=_scaling(kind, rope, raw),
        turning=rope.get("partial_rotary_factor", raw.get("partial_rotary_factor")) or 1.0,
    )


def _scaling(kind: str, rope: Mapping[str, Any], raw: Mapping[str, Any]) -> Scaling | None:
    if kind == "linear":
        return LinearScaling(float(rope["factor"]))
    if kind == "llama3":
        factor, low, high = (float(rope[key]) for key in ("factor", "low_freq_factor", "high_freq_factor"))
        return Llama3Scaling(factor, low, high, _original_length(rope, raw))
    if kind == "yarn":
        return _yarn(rope, raw)
    return None


def _yarn(rope: Mapping[str, Any], raw: Mapping[str, Any]) -> YarnScaling:
    length = _original_length(rope, raw)
    given = rope["factor"]
    factor = float(raw["max_position_embeddings"] / length if given is None else given)
    attention = rope.get("attention_factor")
    return YarnScaling(
        factor=factor,
        original_length=length,
        beta_fast=rope.get("beta_fast") or 32,
        beta_slow=rope.get("beta_slow") or 1,
        truncate=rope.get("truncate", True),
        attention_factor=_attention_factor(rope, factor) if attention is None else float(attention),
    )


def _attention_factor(rope: Mapping[str, Any], factor: float) -> float:
    """0.1 ln(factor) + 1, the paper's recommendation; DeepSeek's configs scale the logarithm."""

    def scale(weight: float) -> float:
        return 1.0 if factor <= 1 else 0.1 * weight * math.log(factor) + 1.0

    above, below = rope.get("mscale"), rope.get("mscale_all_dim")
    return scale(above) / scale(below) if above and below else scale(1.0)


def _original_length(rope: Mapping[str, Any], raw: Mapping[str, Any]) -> int:
    """A value beside the rope's own wins, and the model's own length stands in, as in transformers."""
    beside = raw.get("original_max_position_embeddings") or rope.get("original_max_position_embeddings")
    return int(beside or raw["max_position_embeddings"])
