"""Supervised fine-tuning: learn rows as they are."""

from __future__ import annotations

from typing import Literal

from finery.types.ids import FileId
from finery.types.spec import JobSpec, Passes

TrainOn = Literal["assistant", "last", "completion", "all"]


class SftHyperparameters(Passes):
    train_on: TrainOn = "assistant"
    """Whose tokens carry loss. Chat rows: every `assistant` turn, the `last` one, or `all` tokens. Prompt/completion
    rows: the `completion` (`assistant` and `last` mean the same there) or `all`. Text is always trained whole;
    pre-tokenised rows say it themselves."""


class SftJobCreate(JobSpec):
    """The body of `POST /v1/jobs` for supervised fine-tuning."""

    method: Literal["sft"]
    training_file: FileId
    """Rows of one of the formats chat, completion, text, tokens."""
    validation_file: FileId | None = None
    hyperparameters: SftHyperparameters = SftHyperparameters()
