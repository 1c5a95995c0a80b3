"""A packed batch: rows laid end to end, no padding, nothing shared between rows."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, fields

import numpy as np
import torch
from numpy.typing import ArrayLike
from torch import Tensor


@dataclass(frozen=True)
class PackedBatch:
    """One forward pass over T tokens."""

    tokens: Tensor
    """int64 [T]"""
    positions: Tensor
    """int64 [T], counts from 0 in every row"""
    targets: Tensor
    """int64 [T], the token to predict at t, that is the row's token t+1; any token where the weight is 0"""
    weights: Tensor
    """float32 [T], how much predicting `targets[t]` counts; 0 at the last position of every row"""
    lengths: tuple[int, ...]
    """Rows in order; sums to T. Attention never crosses rows."""

    def __post_init__(self) -> None:
        total = sum(self.lengths)
        if not self.lengths or min(self.lengths) < 1:
            raise ValueError(f"lengths: expected one or more rows of at least 1 token, found {self.lengths}")
        kinds = {"tokens": torch.int64, "positions": torch.int64, "targets": torch.int64, "weights": torch.float32}
        for name, dtype in kinds.items():
            value: Tensor = getattr(self, name)
            if value.shape != (total,) or value.dtype != dtype:
                found = f"{value.dtype} {tuple(value.shape)}"
                raise ValueError(f"{name}: expected {dtype} of shape ({total},), found {found}")
        ends = torch.tensor(self.lengths, device=self.weights.device).cumsum(0) - 1
        if bool(self.weights[ends].any()):
            raise ValueError("weights: expected 0 at the last position of every row, whose next token is another row's")

    @property
    def scored(self) -> int:
        """Positions with weight > 0."""
        return int((self.weights > 0).sum())

    def to(self, device: str | torch.device) -> PackedBatch:
        moved = {f.name: getattr(self, f.name).to(device) for f in fields(self) if f.name != "lengths"}
        return PackedBatch(**moved, lengths=self.lengths)


def pack(rows: Sequence[tuple[ArrayLike, ArrayLike]]) -> PackedBatch:
    """Rows of (tokens, weights), where weights[i] is the loss weight of *token i* (so weights[0] is never used).

    A target is the next token of the same row, so the last position of a row has none.
    """
    parts = [(np.asarray(tokens, dtype=np.int64), np.asarray(weights, dtype=np.float32)) for tokens, weights in rows]
    for tokens, weights in parts:
        if len(tokens) != len(weights):
            found = f"{len(tokens)} tokens and {len(weights)} weights"
            raise ValueError(f"expected one weight per token, found {found}")
    lengths = tuple(len(tokens) for tokens, _ in parts)
    joined = torch.from_numpy(np.concatenate([tokens for tokens, _ in parts]))
    shifted = torch.from_numpy(np.concatenate([weights for _, weights in parts])).roll(-1)
    shifted[torch.tensor(lengths).cumsum(0) - 1] = 0.0
    return PackedBatch(
        tokens=joined,
        positions=torch.cat([torch.arange(length) for length in lengths]),
        targets=joined.roll(-1),
        weights=shifted,
        lengths=lengths,
    )
