"""What the child that renders is asked for, and how far it is."""

from __future__ import annotations

import mmap
import struct
from datetime import datetime
from pathlib import Path
from typing import Literal

from pydantic import BaseModel

from finery.types.files import FileEncoding
from finery.types.methods import TrainOn, Truncation
from finery_gpu_workers.data.rendering import Phase

RESULT = "result.json"
PROGRESS = "progress"
PARAMS = {"train": "training_file", "validation": "validation_file"}
"""The fields of a job that name its files."""


class Upload(BaseModel):
    path: Path
    encoding: FileEncoding


class Look(BaseModel):
    """Only these rows are wanted, token by token, and nothing is written for training."""

    first_line: int
    rows: int


class Request(BaseModel):
    tokenizer_folder: Path
    added_tokens: tuple[str, ...]
    vocabulary: int
    """Rows of the model's embedding, those of added tokens included."""
    files: dict[str, Upload]
    """Uploaded files by the name of their set."""
    params: dict[str, str] = PARAMS
    """What the rows of a set are called in an error, by its name."""
    output: Path
    method: Literal["sft", "dpo", "rl"] | None = None
    """None: a preview, which shows rows of every format."""
    train_on: TrainOn = "assistant"
    max_length: int
    truncation: Truncation
    held_out: int = 0
    """RL: prompts of the set `validation`; without a file for it they are the last ones of the other."""
    preview: Look | None
    now: datetime
    parent: int
    """Its pid: this process must not outlive it."""


class Progress:
    """Where the child is: phase, number of the file, line, and how often it has rendered; in 32 bytes shared through a
    file."""

    _FORMAT = "<qqqq"

    def __init__(self, path: Path, *, create: bool = False) -> None:
        if create:
            path.write_bytes(bytes(struct.calcsize(self._FORMAT)))
        with path.open("r+b") as file:
            self._memory = mmap.mmap(file.fileno(), 0)
        self._rendered = 0

    def set(self, file: int, phase: Phase, line: int) -> None:
        struct.pack_into("<qqq", self._memory, 0, phase, file, line)

    def rendered(self) -> None:
        """One more text: a row of many turns takes a thousand of them."""
        self._rendered += 1
        struct.pack_into("<q", self._memory, 24, self._rendered)

    def get(self) -> tuple[Phase, int, int, int]:
        phase, file, line, rendered = struct.unpack_from(self._FORMAT, self._memory, 0)
        return Phase(phase), file, line, rendered

    def close(self) -> None:
        self._memory.close()
