"""What the engine needs of a model that decodes: prompts are read once, rows grow by a token at a time."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Protocol, TypeVar

from torch import Tensor


class Prefix(Protocol):
    """A prompt that was read, which rows begin from; it holds memory as long as it is held."""

    @property
    def logits(self) -> Tensor:
        """[vocab], of what comes after the prompt."""


P = TypeVar("P", bound=Prefix)


class Backend(Protocol[P]):
    """Rows are numbered from 0 in the order in which they were added."""

    @property
    def longest_row(self) -> int | None:
        """Tokens, prompt included, that the model can read."""

    def read(self, prompts: Sequence[tuple[int, ...]]) -> list[P]: ...

    def add(self, prefix: P) -> None:
        """A row more, which begins with the prefix."""

    def step(self, tokens: Sequence[int]) -> Tensor:
        """One token for each row → [rows, vocab], of what comes after it."""

    def retire(self, row: int) -> None:
        """The last row takes its number."""
