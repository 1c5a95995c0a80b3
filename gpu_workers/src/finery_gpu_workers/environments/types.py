"""What an environment is asked, and what it answers. Loads no torch."""

from __future__ import annotations

from concurrent.futures import Future
from dataclasses import dataclass, field
from typing import Any, Protocol

from finery.types.environments import RewardFailure


@dataclass(frozen=True)
class Answer:
    """What is to be graded."""

    output_text: str
    item: dict[str, Any]
    """The prompt's row."""
    messages: tuple[dict[str, Any], ...] = ()
    """The prompt's, without the answer; empty where it is a text."""


@dataclass(frozen=True)
class Grade:
    """Exactly one of `reward` (finite) and `failure` is there."""

    reward: float | None = None
    parts: dict[str, float | None] = field(default_factory=dict)
    failure: RewardFailure | None = None
    seconds: float = 0.0
    """On the clock."""
    cpu_seconds: float = 0.0
    """Of customers' code."""
    llm_input: int = 0
    llm_output: int = 0
    """Tokens of score models, as they said."""
    printed: str = ""


class Rewards(Protocol):
    """Grades answers in processes of its own; thread-safe. Every grade ends by its deadline, also where a process has
    to be killed; nothing that one answer does harms another's grade."""

    def submit(self, answer: Answer) -> Future[Grade]:
        """Never raises through the future but for faults of ours."""

    def close(self) -> None:
        """Kills and reaps all processes, and removes their folders."""
