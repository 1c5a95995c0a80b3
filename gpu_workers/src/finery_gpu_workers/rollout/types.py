"""What the rollout engine is asked for, and what it answers with. Loads no torch."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Literal

Finish = Literal["stop", "length"]


@dataclass(frozen=True)
class Sampling:
    """How tokens are drawn. Order: temperature, top_k, top_p, min_p; then the rest is normalised again."""

    max_new_tokens: int
    temperature: float = 1.0
    """0: greedy, the likeliest token, the first of equals; its log-prob is that at temperature 1, of all tokens."""
    top_p: float = 1.0
    top_k: int | None = None
    min_p: float = 0.0
    stop_ids: frozenset[int] = frozenset()
    """The model's end tokens; the one that ends a rollout is its last token."""
    stop_texts: tuple[str, ...] = ()
    """A rollout ends with the token that completes one; it stays in it."""


@dataclass(frozen=True)
class Group:
    """One prompt and the rollouts that are wanted of it."""

    key: int
    """The caller's own."""
    prompt: tuple[int, ...]
    """Token ids, at least one."""
    seeds: tuple[int, ...]
    """One per rollout, from 0 to below 2**63: it alone (with the model, the prompt and `Sampling`) decides what is
    drawn, whatever shares the batch, rounding aside."""


@dataclass
class Completion:
    """One finished rollout."""

    group: int
    """Its group's `key`."""
    sample: int
    """Its place among the group's seeds."""
    tokens: list[int] = field(default_factory=list)
    log_probs: list[float] = field(default_factory=list)
    """Of each token, in the distribution that it was drawn from."""
    versions: list[int] = field(default_factory=list)
    """Of the weights, for each token."""
    finish: Finish = "length"
    seconds: float = 0.0
    """From the beginning of its prefill to its last token."""


@dataclass
class Spent:
    """Token counts since the engine was made; what is billed and what throughput is made of."""

    prefill: int = 0
    """Prompt tokens that were computed."""
    prefill_cached: int = 0
    """Prompt tokens that further rollouts of a group took from the cache."""
    generated: int = 0
