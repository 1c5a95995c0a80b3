"""A packed batch: rows laid end to end, no padding. Rows share nothing but a prefix, where one is given as a parent."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property

import numpy as np
import torch
from numpy.typing import ArrayLike
from torch import Tensor

_KINDS = {"tokens": torch.int64, "positions": torch.int64, "targets": torch.int64, "weights": torch.float32}


@dataclass(frozen=True)
class PackedBatch:
    """One forward pass over T tokens."""

    tokens: Tensor
    """int64 [T]"""
    positions: Tensor
    """int64 [T], counts from 0 in every row, and from the length of its parent in a row that has one"""
    targets: Tensor
    """int64 [T], the token to predict at t, that is the row's token t+1; any token where the weight is 0"""
    weights: Tensor
    """float32 [T], how much predicting `targets[t]` counts; 0 at the last position of every row and in parents"""
    lengths: tuple[int, ...]
    """Rows in order; sums to T. Attention never crosses rows, but to the parent's."""
    parents: tuple[int, ...] = ()
    """For every row the earlier row whose tokens come before its own, or -1; empty: none has one. A parent has none."""

    def __post_init__(self) -> None:
        total = sum(self.lengths)
        if not self.lengths or min(self.lengths) < 1:
            raise ValueError(f"lengths: expected one or more rows of at least 1 token, found {self.lengths}")
        for name, dtype in _KINDS.items():
            value: Tensor = getattr(self, name)
            if value.shape != (total,) or value.dtype != dtype:
                found = f"{value.dtype} {tuple(value.shape)}"
                raise ValueError(f"{name}: expected {dtype} of shape ({total},), found {found}")
        ends = torch.tensor(self.lengths, device=self.weights.device).cumsum(0) - 1
        if bool(self.weights[ends].any()):
            raise ValueError("weights: expected 0 at the last position of every row, whose next token is another row's")
        self._check_parents()

    def _check_parents(self) -> None:
        if self.parents and len(self.parents) != len(self.lengths):
            found = f"{len(self.parents)} for {len(self.lengths)} rows"
            raise ValueError(f"parents: expected one per row, or none at all, found {found}")
        for row, parent in enumerate(self.parents):
            if parent != -1 and not (0 <= parent < row and self.parents[parent] == -1):
                raise ValueError(f"parents: row {row}: expected -1 or an earlier row without a parent, found {parent}")
        if not self._prefixes:
            return
        prefixes = torch.tensor([row in self._prefixes for row in range(len(self.lengths))])
        inside = prefixes.repeat_interleave(torch.tensor(self.lengths)).to(self.weights.device)
        if bool(self.weights[inside].any()):
            raise ValueError("weights: expected 0 in a parent, found others; give what counts to a row of its own")

    @cached_property
    def _prefixes(self) -> frozenset[int]:
        """Rows that are a parent."""
        return frozenset(self.parents) - {-1}

    @property
    def scored(self) -> int:
        """Positions with weight > 0."""
        return int((self.weights > 0).sum())

    @property
    def scored_counts(self) -> tuple[int, ...]:
        """Positions with weight > 0 of every row that is no parent, in order: of every answer, after `pack_shared`."""
        rows = enumerate((self.weights > 0).split(self.lengths))
        return tuple(int(one.sum()) for row, one in rows if row not in self._prefixes)

    def to(self, device: str | torch.device) -> PackedBatch:
        tokens, positions, targets, weights = (getattr(self, name).to(device) for name in _KINDS)
        return PackedBatch(tokens, positions, targets, weights, self.lengths, self.parents)

    def expanded(self) -> PackedBatch:
        """The same rows apart, each with its prefix in front and no parents; scored positions keep their order."""
        if not self._prefixes:
            return PackedBatch(self.tokens, self.positions, self.targets, self.weights, self.lengths)
        rows = [row for row in range(len(self.lengths)) if row not in self._prefixes]
        # Of each row, the rows that it is made of.
        made = [(self.parents[row], row) if self.parents[row] >= 0 else (row,) for row in rows]
        tokens, positions, targets, weights = (
            torch.cat([part for row in made for part in map(getattr(self, name).split(self.lengths).__getitem__, row)])
            for name in _KINDS
        )
        lengths = tuple(sum(self.lengths[n] for n in row) for row in made)
        return PackedBatch(tokens, positions, targets, weights, lengths)


@dataclass(frozen=True)
class SharedRows:
    """Answers to one prompt."""

    prompt: ArrayLike
    """Token ids. Without any, the first token of an answer has nothing before it and is no target."""
    answers: Sequence[tuple[ArrayLike, ArrayLike]]
    """(tokens, loss weight of each token)"""


def pack(rows: Sequence[tuple[ArrayLike, ArrayLike]]) -> PackedBatch:
    """Rows of (tokens, weights), where weights[i] is the loss weight of *token i* (so weights[0] is never used).

    A target is the next token of the same row, so the last position of a row has none.
    """
    return _packed(rows, (-1,) * len(rows))


def pack_shared(groups: Sequence[SharedRows]) -> PackedBatch:
    """Every prompt once. Its last token begins each of its answers, so that it can predict their first ones.

    A prompt of one token, or of none, is not shared.
    """
    rows: list[tuple[ArrayLike, ArrayLike]] = []
    parents: list[int] = []
    for group in groups:
        prompt, parent = np.asarray(group.prompt, dtype=np.int64), -1
        if len(prompt) > 1 and group.answers:
            parent = len(rows)
            rows.append((prompt[:-1], np.zeros(len(prompt) - 1, dtype=np.float32)))
            parents.append(-1)
        for tokens, weights in group.answers:
            rows.append((np.append(prompt[-1:], tokens), np.append(np.zeros(len(prompt[-1:]), np.float32), weights)))
            parents.append(parent)
    return _packed(rows, tuple(parents))


def _packed(rows: Sequence[tuple[ArrayLike, ArrayLike]], parents: tuple[int, ...]) -> PackedBatch:
    parts = [(np.asarray(tokens, dtype=np.int64), np.asarray(weights, dtype=np.float32)) for tokens, weights in rows]
    for tokens, weights in parts:
        if len(tokens) != len(weights):
            found = f"{len(tokens)} tokens and {len(weights)} weights"
            raise ValueError(f"expected one weight per token, found {found}")
    lengths = tuple(len(tokens) for tokens, _ in parts)
    starts = [lengths[parent] if parent >= 0 else 0 for parent in parents]
    joined = torch.from_numpy(np.concatenate([tokens for tokens, _ in parts]))
    shifted = torch.from_numpy(np.concatenate([weights for _, weights in parts])).roll(-1)
    shifted[torch.tensor(lengths).cumsum(0) - 1] = 0.0
    return PackedBatch(
        tokens=joined,
        positions=torch.cat([torch.arange(s, s + length) for s, length in zip(starts, lengths, strict=True)]),
        targets=joined.roll(-1),
        weights=shifted,
        lengths=lengths,
        parents=parents if any(parent >= 0 for parent in parents) else (),
    )
