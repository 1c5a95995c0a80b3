"""Prompts of an environment: rendered, written next to their token ids, and read again.

`items-<set>.jsonl` has one line for each sample of its set, in order:
`{"prompt": place in the environment from 0, "messages": […] or null, "text": … or null, "item": {…}}`.
"""

from __future__ import annotations

import json
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from finery.data.messages import Message
from finery.data.rows import ChatRow, PromptRow
from finery_gpu_workers.data.chat import RowError, Template
from finery_gpu_workers.data.missing import missing_from
from finery_gpu_workers.data.prepared import Prepared, sha256_file
from finery_gpu_workers.data.samples import Prompted
from finery_gpu_workers.data.turns import MAX_RENDERED_MESSAGES, check_addresses


def render_prompt(template: Template | None, row: PromptRow) -> Prompted:
    """With the header of the answer that is to be sampled. Raises RowError."""
    if row.text is not None:
        return Prompted(row.text, is_text=True)
    assert template is not None
    text = template.render(row.messages, prompt=True, tools=row.tools)
    as_chat = ChatRow(row.messages, row.tools)
    check_addresses(as_chat, text)
    missing = missing_from(template, as_chat, text, prompt=True)
    return Prompted(text, False, missing, _rewritten(template, row, text))


def _rewritten(template: Template, row: PromptRow, text: str) -> int | None:
    """The first assistant turn of the prompt that was another text while it was the last of the conversation."""
    turns = [n for n, message in enumerate(row.messages) if message["role"] == "assistant"]
    if len(turns) * len(row.messages) > MAX_RENDERED_MESSAGES:
        return None  # it is for a warning only
    for n in turns:
        try:
            until = template.render(row.messages[: n + 1], tools=row.tools)
        except RowError:  # a template that wants the user's message last, perhaps; the prompt itself is fine
            return None
        if not text.startswith(until):
            return n
    return None


def places(path: Path) -> Iterator[int]:
    """Where the lines of a file begin, and where the last ends."""
    place = 0
    with path.open("rb") as file:
        for line in file:
            yield place
            place += len(line)
    yield place


@dataclass
class ItemWriter:
    """Writes the items of one set."""

    folder: Path
    name: str

    def __post_init__(self) -> None:
        self._path = self.folder / f"items-{self.name}.jsonl"
        self._file = self._path.open("w", encoding="utf-8")

    def add(self, place: int, row: PromptRow) -> None:
        """`place`: of the prompt in its environment, from 0."""
        messages = list(row.messages) or None
        content = {"prompt": place, "messages": messages, "text": row.text, "item": row.item}
        self._file.write(json.dumps(content, allow_nan=False) + "\n")

    def close(self) -> dict[str, Any]:
        """What the index says of the file."""
        self._file.close()
        size = self._path.stat().st_size
        return {"path": self._path.name, "bytes": size, "sha256": sha256_file(self._path)}


@dataclass(frozen=True)
class Prompt:
    place: int
    """In the environment, from 0; those of a `held_out_file` come after those of `file`."""
    tokens: NDArray[np.int32]
    """[P], with the generation prompt"""
    messages: tuple[Message, ...]
    """Empty where the prompt is a text."""
    text: str | None
    item: dict[str, Any]
    """The row, as graders see it."""


class PromptSet:
    """The prompts of the set `name` of prepared data; an item is read when it is asked for."""

    def __init__(self, data: Prepared, name: str = "train") -> None:
        samples = data.train if name == "train" else data.validation
        entry = data.index["sets"].get(name, {}).get("items")
        if samples is None or entry is None:
            raise ValueError(f"expected a set {name!r} of prompts, found none")
        self._samples = samples
        self._path = data.folder / entry["path"]
        self._places = np.fromiter(places(self._path), dtype=np.int64)
        if len(self._places) != len(samples) + 1:
            raise ValueError(f"{name}: expected {len(samples)} items, found {len(self._places) - 1}")
        self.lengths = samples.lengths
        """[prompts], tokens"""

    def __len__(self) -> int:
        return len(self._samples)

    def prompt(self, n: int) -> Prompt:
        with self._path.open("rb") as file:
            file.seek(int(self._places[n]))
            content = json.loads(file.read(int(self._places[n + 1] - self._places[n])))
        messages = tuple(content["messages"] or ())
        return Prompt(content["prompt"], self._samples.row(n).tokens, messages, content["text"], content["item"])
