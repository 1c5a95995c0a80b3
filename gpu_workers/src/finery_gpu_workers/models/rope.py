"""Rotary position embedding (Su et al. 2021, arXiv:2104.09864), in the half-rotated layout of the Llama weights."""

from __future__ import annotations

import math

import torch
from torch import Tensor

from finery_gpu_workers.models.config import DecoderConfig
from finery_gpu_workers.models.scaling import LinearScaling, Llama3Scaling, YarnScaling


def inverse_frequencies(config: DecoderConfig) -> Tensor:
    """float32 [head_dim / 2], radians per position."""
    exponents = torch.arange(0, config.head_dim, 2, dtype=torch.float32) / config.head_dim
    frequencies = 1.0 / config.rope_theta**exponents
    scaling = config.rope_scaling
    if isinstance(scaling, LinearScaling):
        return frequencies / scaling.factor
    if isinstance(scaling, Llama3Scaling):
        return _llama3(frequencies, scaling)
    if isinstance(scaling, YarnScaling):
        return _yarn(frequencies, scaling, config)
    return frequencies


def amplitude(config: DecoderConfig) -> float:
    """What cosine and sine are multiplied by."""
    scaling = config.rope_scaling
    return scaling.attention_factor if isinstance(scaling, YarnScaling) else 1.0


def _llama3(frequencies: Tensor, scaling: Llama3Scaling) -> Tensor:
    """Long waves are slowed by `factor`, short ones stay, those between are blended by how many turns they make."""
    turns = scaling.original_length * frequencies / (2 * math.pi)
    blend = (turns - scaling.low_freq_factor) / (scaling.high_freq_factor - scaling.low_freq_factor)
    blend = blend.clamp(0.0, 1.0)
    return (1.0 - blend) * frequencies / scaling.factor + blend * frequencies


def _yarn(frequencies: Tensor, scaling: YarnScaling, config: DecoderConfig) -> Tensor:
    """Dimensions before `low` keep their frequency, those behind `high` are slowed, with a straight ramp between."""

    def dimension(turns: float) -> float:
        """The one that makes so many turns within the original length."""
        waves = scaling.original_length / (turns * 2 * math.pi)
        return config.head_dim * math.log(waves) / (2 * math.log(config.rope_theta))

    low, high = dimension(scaling.beta_fast), dimension(scaling.beta_slow)
    if scaling.truncate:
        low, high = math.floor(low), math.ceil(high)
    low, high = max(low, 0), min(high, config.head_dim - 1)
    width = high - low or 0.001
    slowed = ((torch.arange(len(frequencies), dtype=torch.float32) - low) / width).clamp(0.0, 1.0)
    return frequencies / scaling.factor * slowed + frequencies * (1.0 - slowed)


def rotation(
    frequencies: Tensor, positions: Tensor, dtype: torch.dtype, amplitude: float = 1.0
) -> tuple[Tensor, Tensor]:
    """Cosine and sine, each [T, 1, head_dim]; angles in float32."""
    angles = positions[:, None].float() * frequencies
    angles = torch.cat((angles, angles), dim=-1)[:, None, :]
    return (angles.cos() * amplitude).to(dtype), (angles.sin() * amplitude).to(dtype)


def rotate(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    """x [T, heads, head_dim]"""
    first, second = x.chunk(2, dim=-1)
    return x * cos + torch.cat((-second, first), dim=-1) * sin
