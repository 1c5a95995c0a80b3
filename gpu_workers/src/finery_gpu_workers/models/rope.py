"""Rotary position embedding (Su et al. 2021, arXiv:2104.09864), in the half-rotated layout of the Llama weights."""

from __future__ import annotations

import math

import torch
from torch import Tensor

from finery_gpu_workers.models.config import DecoderConfig, Llama3Scaling


def inverse_frequencies(config: DecoderConfig) -> Tensor:
    """float32 [head_dim / 2], radians per position."""
    exponents = torch.arange(0, config.head_dim, 2, dtype=torch.float32) / config.head_dim
    frequencies = 1.0 / config.rope_theta**exponents
    return frequencies if config.rope_scaling is None else _stretch(frequencies, config.rope_scaling)


def _stretch(frequencies: Tensor, scaling: Llama3Scaling) -> Tensor:
    """Long waves are slowed by `factor`, short ones stay, those between are blended by how many turns they make."""
    turns = scaling.original_length * frequencies / (2 * math.pi)
    blend = (turns - scaling.low_freq_factor) / (scaling.high_freq_factor - scaling.low_freq_factor)
    blend = blend.clamp(0.0, 1.0)
    return (1.0 - blend) * frequencies / scaling.factor + blend * frequencies


def rotation(frequencies: Tensor, positions: Tensor, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
    """Cosine and sine, each [T, 1, head_dim]; angles in float32."""
    angles = positions[:, None].float() * frequencies
    angles = torch.cat((angles, angles), dim=-1)[:, None, :]
    return angles.cos().to(dtype), angles.sin().to(dtype)


def rotate(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    """x [T, heads, head_dim]"""
    first, second = x.chunk(2, dim=-1)
    return x * cos + torch.cat((-second, first), dim=-1) * sin
