"""Which rows (or pairs) an update holds: a pure function of their lengths, hyper-parameters and seed.

Every epoch shuffles the rows by (seed, epoch) and fills updates greedily with up to `batch_tokens` tokens. A row is
never split; a longer one is an update of its own. The end of an epoch ends an update. Steps count from 1.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from finery.types.spec import Passes

Ints = NDArray[np.int64]


@dataclass(frozen=True)
class Update:
    """The rows of one optimizer update, in order."""

    epoch: int
    """From 0."""
    position: int
    """Rows of the epoch that came before."""
    rows: Ints


@dataclass(frozen=True)
class _Epoch:
    order: Ints
    starts: Ints
    """[updates + 1], positions in `order`"""

    def __len__(self) -> int:
        return len(self.starts) - 1


class Plan:
    """All updates of a job; `total_steps` is exact. Epochs are laid out when they are asked for."""

    def __init__(self, lengths: Ints, hyper: Passes, seed: int) -> None:
        if not len(lengths) or int(lengths.min()) < 1:
            raise ValueError("lengths: expected one or more rows of at least 1 token")
        self._lengths = lengths
        self._batch_tokens = hyper.batch_tokens
        self._seed = seed
        self._cached: tuple[int, _Epoch] | None = None
        first = [1]
        while hyper.max_steps is not None or len(first) <= hyper.epochs:
            first.append(first[-1] + len(self._epoch(len(first) - 1)))
            if hyper.max_steps is not None and first[-1] > hyper.max_steps:
                break
        self._first: Ints = np.array(first, dtype=np.int64)
        """The first step of every epoch; one entry more than there are epochs, the last beyond the end."""
        self.total_steps: int = first[-1] - 1 if hyper.max_steps is None else hyper.max_steps

    def update(self, step: int) -> Update:
        """The update of step 1 … total_steps."""
        if not 1 <= step <= self.total_steps:
            raise ValueError(f"step: expected 1 to {self.total_steps}, found {step}")
        epoch = int(np.searchsorted(self._first, step, side="right")) - 1
        layout = self._epoch(epoch)
        n = step - self._first[epoch]
        start, end = layout.starts[n : n + 2]
        return Update(epoch, int(start), layout.order[start:end])

    def total(self, per_row: Ints) -> int:
        """The sum of a per-row count over all updates."""
        whole = len(self._first) - 2
        last = self._epoch(whole)
        done = last.starts[self.total_steps + 1 - self._first[whole]]
        return whole * int(per_row.sum()) + int(per_row[last.order[:done]].sum())

    def _epoch(self, number: int) -> _Epoch:
        if self._cached is None or self._cached[0] != number:
            self._cached = number, self._lay_out(number)
        return self._cached[1]

    def _lay_out(self, number: int) -> _Epoch:
        # Raw Philox bits are the same in every numpy; `permutation` is not promised to be.
        bits = np.random.Philox(key=[self._seed, number]).random_raw(len(self._lengths))
        order: Ints = np.argsort(bits, kind="stable")
        ends = np.cumsum(self._lengths[order])
        starts = [0]
        while starts[-1] < len(order):
            before = int(ends[starts[-1] - 1]) if starts[-1] else 0
            fits = int(np.searchsorted(ends, before + self._batch_tokens, side="right"))
            starts.append(max(fits, starts[-1] + 1))
        return _Epoch(order, np.array(starts, dtype=np.int64))


def micro_batches(rows: Ints, lengths: Ints, limit: int) -> list[Ints]:
    """`rows` cut, in order, into runs of up to `limit` tokens; a longer row is a run of its own."""
    runs: list[list[int]] = []
    tokens = 0
    for row in rows.tolist():
        length = int(lengths[row])
        if not runs or tokens + length > limit:
            runs.append([])
            tokens = 0
        runs[-1].append(row)
        tokens += length
    return [np.array(run, dtype=np.int64) for run in runs]
