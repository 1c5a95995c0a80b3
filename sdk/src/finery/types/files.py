"""Uploaded data sets."""

from __future__ import annotations

from typing import Any, Literal

from finery.types.base import Linked, Time
from finery.types.errors import Problem

FileFormat = Literal["chat", "completion", "text", "tokens", "preference", "prompts"]
"""What a row is: messages; prompt and completion; a text; token ids; two answers of which one was chosen; a prompt with
what graders need to know. The first row decides for the whole file."""
SFT_FORMATS: tuple[FileFormat, ...] = ("chat", "completion", "text", "tokens")
FileEncoding = Literal["jsonl", "parquet"]
FileStatus = Literal["valid", "invalid"]


class File(Linked):
    """An uploaded data set: immutable, checked at upload, addressed by content within its tenant."""

    object: Literal["file"] = "file"
    id: str
    project: str
    name: str
    bytes: int
    sha256: str
    status: FileStatus | str
    format: FileFormat | str | None = None
    encoding: FileEncoding | str = "jsonl"
    rows: int
    """Good rows."""
    errors: tuple[Problem, ...] = ()
    """The first 100 problems; `error_count` counts all."""
    error_count: int = 0
    created_at: Time

    def preview(self, *, model: str, **options: Any) -> Any:
        """`client.files.preview` of this file: how `model` would be trained on its rows."""
        return self._client().files.preview(self, model=model, **options)

    def delete(self) -> Any:
        return self._client().files.delete(self)
