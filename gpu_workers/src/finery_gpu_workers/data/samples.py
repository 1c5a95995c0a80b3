"""From an uploaded row to what is tokenised: one sample, or one per turn."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

from finery.data.rows import ChatRow, CompletionRow, Row, TextRow, TokensRow
from finery.types.files import FileFormat
from finery.types.methods import TrainOn
from finery_gpu_workers.data.chat import Template
from finery_gpu_workers.data.turns import Rendered, render_chat
from finery_gpu_workers.errors import WorkerError


@dataclass(frozen=True)
class Plain:
    """Text without a template: the tokenizer's BOS goes before it, where it has one, and an end token behind it."""

    prompt: str
    rest: str
    everything: bool
    """All tokens carry loss; otherwise those of `rest` and the end token."""


Sample = Rendered | Plain | TokensRow


def samples_of(template: Template | None, row: Row, train_on: TrainOn) -> Iterator[Sample]:
    """Raises RowError. Chat rows need the template."""
    if isinstance(row, ChatRow):
        assert template is not None
        yield from render_chat(template, row, train_on)
    elif isinstance(row, CompletionRow):
        yield Plain(row.prompt, row.completion, everything=train_on == "all")
    elif isinstance(row, TextRow):
        yield Plain("", row.text, everything=True)
    else:
        yield row


def check_train_on(format_: FileFormat, train_on: TrainOn) -> None:
    """Raises WorkerError where the two have no meaning together."""
    impossible = {"chat": ("completion",), "text": ("completion", "last")}
    if train_on in impossible.get(format_, ()):
        possible = '"assistant", "last" or "all"' if format_ == "chat" else '"assistant" or "all"'
        message = f"hyperparameters.train_on: expected {possible} for rows of format {format_}, found {train_on!r}."
        raise WorkerError("train_on_not_possible", message, param="hyperparameters.train_on")
