"""From an uploaded row to what is tokenised: one sample, one per turn, or the two sides of a pair."""

from __future__ import annotations

from collections.abc import Iterator

from finery.data.rows import ChatRow, CompletionRow, PreferenceRow, PromptRow, Row, TextRow
from finery.types.files import SFT_FORMATS, FileFormat
from finery.types.methods import TrainOn
from finery_gpu_workers.data.chat import Template
from finery_gpu_workers.data.pairs import render_pair
from finery_gpu_workers.data.prompts import render_prompt
from finery_gpu_workers.data.samples import Plain, Sample
from finery_gpu_workers.data.turns import render_chat
from finery_gpu_workers.errors import WorkerError

FORMATS: dict[str, tuple[FileFormat, ...]] = {"sft": SFT_FORMATS, "dpo": ("preference",), "rl": ("prompts",)}
"""What each method learns from."""


def needs_template(row: Row) -> bool:
    """Whether it holds messages."""
    if isinstance(row, PreferenceRow):
        return isinstance(row.chosen, ChatRow)
    return isinstance(row, ChatRow) or (isinstance(row, PromptRow) and row.text is None)


def samples_of(template: Template | None, row: Row, train_on: TrainOn) -> Iterator[Sample]:
    """Raises RowError. Rows with messages need the template."""
    if isinstance(row, PreferenceRow):
        yield from render_pair(template, row)
    elif isinstance(row, PromptRow):
        yield render_prompt(template, row)
    elif isinstance(row, ChatRow):
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


def check_format(format_: FileFormat, method: str, param: str) -> None:
    """Raises WorkerError where the method does not learn from such rows."""
    if format_ not in FORMATS[method]:
        expected = " or ".join(FORMATS[method])
        message = f"{param}: expected rows of format {expected} for method {method}, found {format_}."
        raise WorkerError("wrong_task_format", message, param=param)
