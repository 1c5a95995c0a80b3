"""`python -m finery_gpu_workers.data.render`: renders and tokenises uploaded rows in a process that can be killed.

It runs foreign templates, so it holds no credential and does not reach the network for anything: it reads a request as
JSON on stdin, the model's tokenizer and the rows from disk, and writes shards, index and `result.json` into a folder.
How far it is stands in a small shared file, so that whoever started it can tell slow from stuck.
"""

from __future__ import annotations

import ctypes
import json
import mmap
import resource
import signal
import struct
import sys
from collections.abc import Iterator
from dataclasses import dataclass, field
from datetime import datetime
from enum import IntEnum
from pathlib import Path
from typing import Any

from pydantic import BaseModel

from finery.types.errors import Problem
from finery.types.methods import TrainOn
from finery_gpu_workers.data.chat import RowError, Template, parse_row, render_row, template_sha256
from finery_gpu_workers.data.prepared import INDEX, SetWriter
from finery_gpu_workers.data.tokens import RowTokenizer, tokenizer_sha256
from finery_gpu_workers.errors import WorkerError

RESULT = "result.json"
PROGRESS = "progress"
LISTED_PROBLEMS = 100
_CHUNK_ROWS = 128
_CHUNK_BYTES = 256 * 1024
_ADDRESS_SPACE = 8 * 2**30
_PR_SET_PDEATHSIG = 1


class Request(BaseModel):
    model_folder: Path
    files: dict[str, Path]
    """Uploaded files by the name of their set."""
    output: Path
    train_on: TrainOn
    max_length: int
    now: datetime
    parent: int
    """Its pid: this process must not outlive it."""


class Phase(IntEnum):
    STARTING = 0
    TEMPLATE = 1
    TOKENIZER = 2


class Progress:
    """Where the child is: phase, number of the file, line; in 24 bytes shared through a file."""

    _FORMAT = "<qqq"

    def __init__(self, path: Path, *, create: bool = False) -> None:
        if create:
            path.write_bytes(bytes(struct.calcsize(self._FORMAT)))
        with path.open("r+b") as file:
            self._memory = mmap.mmap(file.fileno(), 0)

    def set(self, phase: Phase, file: int, line: int) -> None:
        struct.pack_into(self._FORMAT, self._memory, 0, phase, file, line)

    def get(self) -> tuple[Phase, int, int]:
        phase, file, line = struct.unpack_from(self._FORMAT, self._memory, 0)
        return Phase(phase), file, line

    def close(self) -> None:
        self._memory.close()


@dataclass
class Problems:
    """The first problems of one file, and how many there are."""

    count: int = 0
    first: list[dict[str, Any]] = field(default_factory=list)

    def add(self, error: RowError, line: int) -> None:
        self.count += 1
        if len(self.first) < LISTED_PROBLEMS:
            problem = Problem(line=line, path=error.path, code=error.code, message=error.message, hint=error.hint)
            self.first.append(problem.model_dump())


@dataclass
class Renderer:
    request: Request
    template: Template
    tokenizer: RowTokenizer
    progress: Progress

    def file(self, number: int, name: str, path: Path) -> tuple[dict[str, Any], Problems]:
        """One uploaded file as one set: its index entry, and what is wrong with its rows."""
        writer = SetWriter(self.request.output, name)
        problems = Problems()
        for chunk in _chunks(path):
            rendered, lines = [], []
            for line, content in chunk:
                self.progress.set(Phase.TEMPLATE, number, line)
                try:
                    rendered.append(render_row(self.template, parse_row(content), self.request.train_on))
                    lines.append(line)
                except RowError as error:
                    problems.add(error, line)
            self.progress.set(Phase.TOKENIZER, number, chunk[-1][0])
            for line, row in zip(lines, self.tokenizer.rows(rendered), strict=True):
                if isinstance(row, RowError):
                    problems.add(row, line)
                else:
                    writer.add(row, line, self.request.max_length)
        problems.first.sort(key=lambda problem: problem["line"])
        return writer.close(), problems


def _chunks(path: Path) -> Iterator[list[tuple[int, bytes]]]:
    """Lines with their numbers, in small runs; blank lines and a byte order mark are skipped."""
    chunk: list[tuple[int, bytes]] = []
    size = 0
    with path.open("rb") as file:
        for number, raw in enumerate(file, 1):
            line = raw.removeprefix(b"\xef\xbb\xbf") if number == 1 else raw
            if not line.strip():
                continue
            chunk.append((number, line))
            size += len(line)
            if len(chunk) == _CHUNK_ROWS or size > _CHUNK_BYTES:
                yield chunk
                chunk, size = [], 0
    if chunk:
        yield chunk


def render(request: Request) -> dict[str, Any]:
    """Shards and index into the output folder. The result holds either `sets` or what is wrong."""
    progress = Progress(request.output / PROGRESS)
    tokenizer = RowTokenizer.load(request.model_folder)
    progress.set(Phase.TEMPLATE, 0, 0)
    template = Template.load(request.model_folder, request.now)
    renderer = Renderer(request, template, tokenizer, progress)
    sets = {}
    for number, (name, path) in enumerate(request.files.items()):
        sets[name], problems = renderer.file(number, name, path)
        if problems.count:
            return {"problems": problems.first, "count": problems.count, "set": name}
    index = {
        "version": 1,
        "sets": sets,
        "train_on": request.train_on,
        "max_length": request.max_length,
        "template_sha256": template_sha256(request.model_folder),
        "tokenizer_sha256": tokenizer_sha256(request.model_folder),
        "end_of_turn": sorted(tokenizer.end_of_turn),
    }
    (request.output / INDEX).write_text(json.dumps(index, indent=1))
    return {"sets": sets}


def _confine(parent: int) -> None:
    """Bounded memory; no life after the parent's."""
    resource.setrlimit(resource.RLIMIT_AS, (_ADDRESS_SPACE, _ADDRESS_SPACE))
    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
    if sys.platform == "linux":
        import os

        ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)
        if os.getppid() != parent:
            raise SystemExit("the parent is gone")


def main() -> None:
    request = Request.model_validate_json(sys.stdin.read())
    _confine(request.parent)
    try:
        result = render(request)
    except WorkerError as error:
        result = {"error": {"code": error.code, "message": error.message}}
    (request.output / RESULT).write_text(json.dumps(result))


if __name__ == "__main__":
    main()
