"""What differs between the methods that pass over a file: what is summed, and what it is divided by."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Any, Protocol

import numpy as np
from numpy.typing import NDArray

from finery.types.usage import Sku
from finery_gpu_workers.data.packing import Ints, micro_batches
from finery_gpu_workers.learner import Learner
from finery_gpu_workers.metrics import Clock


class Rows(Protocol):
    """A set as it is counted: rows (SFT) or pairs (DPO)."""

    @property
    def lengths(self) -> NDArray[np.int64]:
        """Tokens of each, as they are computed."""

    @property
    def trained(self) -> NDArray[np.int64]:
        """Targets of each."""

    def __len__(self) -> int: ...


@dataclass
class Sums:
    """Over some rows. Nothing is divided yet, so that micro-batches add up."""

    tokens: int = 0
    """Positions that were scored."""
    values: dict[str, float] = field(default_factory=dict)
    """By name; `loss` is one."""

    def add(self, other: Sums) -> None:
        self.tokens += other.tokens
        for name, value in other.values.items():
            self.values[name] = self.values.get(name, 0.0) + value


@dataclass(frozen=True)
class TimedLearner:
    """What computes, and the clock of its work."""

    learner: Learner
    clock: Clock
    micro_batch_tokens: int

    def micro_batches(self, chosen: Ints, rows: Rows) -> Iterator[Ints]:
        yield from micro_batches(chosen, rows.lengths, self.micro_batch_tokens)


class Objective(Protocol):
    """One method's loss on one job's data."""

    train_sku: Sku
    eval_sku: Sku

    @property
    def train(self) -> Rows: ...

    @property
    def validation(self) -> Rows | None: ...

    def forward_backward(self, chosen: Ints, update: Ints) -> Sums:
        """Adds the gradient that the `chosen` rows of an `update` have in the mean over all of it."""

    def evaluate(self, chosen: Ints) -> Sums:
        """The same numbers of rows of the validation set; changes nothing."""

    def means(self, sums: Sums) -> dict[str, float]:
        """Metrics under the names that customers see, with `loss`, of whole updates and whole sets."""

    def manifest(self) -> dict[str, Any]:
        """What checkpoints say of it besides the spec."""
