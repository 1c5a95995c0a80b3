"""Which tokens of a trajectory were sampled, and so are trained: provenance decides, never the text."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass


@dataclass(frozen=True)
class TokenCounts:
    """Of one trajectory."""

    response: int
    """Sampled tokens: the length that limits and penalties look at. Not the span from the first to the last."""
    trained: int
    """The same tokens: what is sampled is trained."""
    context: int
    """All others: prompt, tool outputs, turns of the environment."""


def token_counts(mask: Sequence[int]) -> TokenCounts:
    """mask [T]: 1 for a sampled token, 0 for the environment's. Raises ValueError on other values."""
    if wrong := sorted(set(mask) - {0, 1}):
        raise ValueError(f"mask: expected 0 and 1, found {wrong}")
    sampled = sum(mask)
    return TokenCounts(response=sampled, trained=sampled, context=len(mask) - sampled)


def trajectory(parts: Iterable[tuple[Sequence[int], bool]]) -> tuple[list[int], list[int]]:
    """Parts (token ids, whether they were sampled), in order → tokens [T], mask [T].

    The mask marks a token as a *target*: the position before it is where its gradient comes from. Raises ValueError if
    the first token is sampled, as nothing precedes it.
    """
    tokens: list[int] = []
    mask: list[int] = []
    for ids, sampled in parts:
        tokens += ids
        mask += [int(sampled)] * len(ids)
    if mask and mask[0]:
        raise ValueError("expected at least one token of context before the first sampled one, found none")
    return tokens, mask
