"""What is tokenised."""

from __future__ import annotations

from dataclasses import dataclass

from finery.data.rows import TokensRow
from finery_gpu_workers.data.turns import Rendered


@dataclass(frozen=True)
class Plain:
    """Text without a template: the tokenizer's BOS goes before it, where it has one, and an end token behind it."""

    prompt: str
    rest: str
    everything: bool
    """All tokens carry loss; otherwise those of `rest` and the end token."""


@dataclass(frozen=True)
class Prompted:
    """What an answer is sampled to; nothing of it is trained."""

    text: str
    is_text: bool
    """No template wrote it: the tokenizer's BOS goes before it, where it has one."""
    missing: frozenset[str] = frozenset()
    """Codes of warnings: what of the row the template did not write."""
    rewritten: int | None = None
    """The first message that the template writes in another way once the conversation goes on."""


Sample = Rendered | Plain | TokensRow | Prompted
