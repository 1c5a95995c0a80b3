"""What the learner needs of a model: our decoder has it, and so has any other one through transformers."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Protocol

import torch
from torch import Tensor

from finery_gpu_workers.models.decoder import Projection


class Model(Protocol):
    """Weights on one device, in one dtype. The head is looked at apart, so that logits exist for scored tokens only."""

    @property
    def engine(self) -> str:
        """`finery` or `transformers`: who computes it."""

    @property
    def engine_reason(self) -> str:
        """Why our decoder does not; empty where it does."""

    @property
    def vocab(self) -> int:
        """Rows of the embedding."""

    @property
    def tied(self) -> bool:
        """The output matrix is the embedding."""

    @property
    def device(self) -> torch.device: ...

    @property
    def dtype(self) -> torch.dtype: ...

    def token_matrices(self) -> tuple[Tensor, ...]:
        """Those with a row for every token: the embedding, and the output matrix where it is one of its own."""

    def untie(self) -> None:
        """A tied output matrix becomes one of its own, equal to the embedding for now."""

    def projections(self) -> Iterator[Projection]:
        """The linear layers of the blocks; setting `delta` on one changes what it answers."""

    @property
    def shares_prefixes(self) -> bool:
        """Rows may have parents; where not, batches are expanded."""

    def forward(
        self, tokens: Tensor, positions: Tensor, lengths: tuple[int, ...], parents: tuple[int, ...] = ()
    ) -> Tensor:
        """int64 [T], int64 [T], rows' lengths and parents → what the head reads, [T, hidden].

        Rows never see each other, but the parent that they go on from (`PackedBatch.parents`).
        """

    def logits(self, hidden: Tensor) -> Tensor:
        """[N, hidden] → [N, vocab]"""

    def named_weights(self) -> Iterator[tuple[str, Tensor]]:
        """Every weight under its name in transformers; a tied output matrix is named once, as the embedding."""

    def stored_name(self, name: str) -> str:
        """The name of a weight in files, where transformers' own differ from those in memory."""
