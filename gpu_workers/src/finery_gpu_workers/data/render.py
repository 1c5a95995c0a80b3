"""`python -m finery_gpu_workers.data.render`: renders and tokenises uploaded rows in a process that can be killed.

It runs foreign templates, so it holds no credential and does not reach the network for anything: it reads a request as
JSON on stdin, the model's tokenizer and the rows from disk, and writes shards, index and `result.json` into a folder;
or, where only a preview is wanted, just its rows and what is to be warned of. How far it is stands in a small shared
file, so that whoever started it can tell slow from stuck.
"""

from __future__ import annotations

import ctypes
import json
import mmap
import resource
import signal
import struct
import sys
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from datetime import datetime
from functools import partial
from itertools import islice
from pathlib import Path
from typing import Any

from pydantic import BaseModel

from finery.types import data as types
from finery.types.data import DataReport, SetReport
from finery.types.errors import Problem
from finery.types.files import FileEncoding
from finery.types.methods import TrainOn, Truncation
from finery_gpu_workers.data.chat import RowError, template_sha256
from finery_gpu_workers.data.cutting import Cutter
from finery_gpu_workers.data.overlap import Overlap
from finery_gpu_workers.data.prepared import INDEX, SetWriter
from finery_gpu_workers.data.preview import preview_rows
from finery_gpu_workers.data.reading import read_rows
from finery_gpu_workers.data.rendering import Phase, Renderer, Rendering
from finery_gpu_workers.data.statistics import SetStatistics
from finery_gpu_workers.data.tokens import RowTokenizer, TokenRow, tokenizer_sha256
from finery_gpu_workers.errors import WorkerError

RESULT = "result.json"
PROGRESS = "progress"
LISTED_PROBLEMS = 100
MAX_PREVIEW_TOKENS = 250_000
"""More would not fit into one message to the control plane, but into much memory."""
PARAMS = {"train": "training_file", "validation": "validation_file"}
_ADDRESS_SPACE = 8 * 2**30
_PR_SET_PDEATHSIG = 1


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
    output: Path
    train_on: TrainOn
    max_length: int
    truncation: Truncation
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


@dataclass
class Problems:
    """The first problems of one file, and how many there are."""

    count: int = 0
    first: list[dict[str, Any]] = field(default_factory=list)

    def add(self, problem: Problem) -> None:
        self.count += 1
        if len(self.first) < LISTED_PROBLEMS:
            self.first.append(problem.model_dump(exclude={"offset"}))


@dataclass
class Preparing:
    """All files of a job, one after the other."""

    request: Request
    renderer: Renderer
    cutter: Cutter
    progress: Progress
    overlap: Overlap = field(default_factory=Overlap)
    warnings: list[types.Warning] = field(default_factory=list)
    reports: dict[str, SetReport] = field(default_factory=dict)

    def file(self, number: int, name: str, upload: Upload) -> tuple[dict[str, Any], Problems]:
        """One uploaded file as one set: its index entry, and what is wrong with its rows."""
        writer, statistics, problems = SetWriter(self.request.output, name), SetStatistics(), Problems()
        rows = read_rows(upload.path, upload.encoding)
        for rendering in self.renderer.render(rows, partial(self.progress.set, number)):
            if rendering.problem is None:
                try:
                    self._row(rendering, writer, statistics)
                except RowError as error:
                    rendering.refuse(error)
            if rendering.problem:
                problems.add(rendering.problem)
        self.overlap.close()
        entry = writer.close()
        self.reports[name] = statistics.report(entry["digest"])
        self.warnings += statistics.warnings(PARAMS[name])
        return entry, problems

    def _row(self, rendering: Rendering, writer: SetWriter, statistics: SetStatistics) -> None:
        kept = [self.cutter.cut(row) for row in rendering.tokens]
        for sample in kept:
            if not isinstance(sample, str):
                writer.add(sample, rendering.line)
        _count(rendering, kept, self.renderer, statistics)
        for code in self.overlap.codes(rendering.tokens):
            statistics.note(code, rendering.line)


def _count(rendering: Rendering, kept: Sequence[TokenRow | str], renderer: Renderer, statistics: SetStatistics) -> None:
    """One row, and what is to be warned of in it."""
    statistics.format = rendering.format or statistics.format
    statistics.add(rendering.line, rendering.tokens, kept, unrolled=rendering.unrolled)
    statistics.note_special(renderer.special_in_content(rendering), rendering.line)
    for code in rendering.notes:
        statistics.note(code, rendering.line)


def render(request: Request) -> dict[str, Any]:
    """Shards and index into the output folder. The result holds a `report`, or what is wrong; or the preview's rows."""
    progress = Progress(request.output / PROGRESS)
    folder = request.tokenizer_folder
    tokenizer = RowTokenizer.load(folder, request.added_tokens)
    progress.set(0, Phase.TEMPLATE, 0)
    renderer = Renderer(folder, tokenizer, request.train_on, request.vocabulary, request.now, progress.rendered)
    cutter = Cutter(request.max_length, request.truncation, next(iter(tokenizer.begin), None))
    if request.preview:
        return _preview(request, request.preview, renderer, cutter, progress)
    preparing = Preparing(request, renderer, cutter, progress)
    sets = {}
    for number, (name, upload) in enumerate(request.files.items()):
        sets[name], problems = preparing.file(number, name, upload)
        if problems.count:
            return {"problems": problems.first, "count": problems.count, "set": name}
    report = DataReport(
        sets=preparing.reports,
        warnings=tuple(preparing.warnings),
        template_sha256=template_sha256(folder) if renderer.template else None,
        tokenizer_sha256=tokenizer_sha256(folder),
        vocab_size=tokenizer.vocab_size,
    )
    index = {
        "version": 2,
        "sets": sets,
        "report": report.model_dump(mode="json"),
        "train_on": request.train_on,
        "max_length": request.max_length,
        "truncation": request.truncation,
        "template_sha256": report.template_sha256,
        "tokenizer_sha256": report.tokenizer_sha256,
        "end_of_turn": sorted(tokenizer.end_of_turn),
    }
    (request.output / INDEX).write_text(json.dumps(index, indent=1))
    return {"report": report.model_dump(mode="json"), "sets": sets}


def _preview(request: Request, look: Look, renderer: Renderer, cutter: Cutter, progress: Progress) -> dict[str, Any]:
    (upload,) = request.files.values()
    rows = islice(read_rows(upload.path, upload.encoding, look.first_line), look.rows)
    found = renderer.render(rows, partial(progress.set, 0))
    shown: list[dict[str, Any]] = []
    statistics, tokens = SetStatistics(), 0
    for rendering in found:
        for row in preview_rows(rendering, renderer.tokenizer, cutter):
            tokens += len(row.tokens)
            if tokens > MAX_PREVIEW_TOKENS:
                message = f"Expected at most {MAX_PREVIEW_TOKENS} tokens to show, found more; ask for fewer rows."
                raise WorkerError("preview_too_large", message, param="rows")
            shown.append(row.model_dump(mode="json"))
        if rendering.problem is None:
            with suppress(RowError):  # shown at the row
                _count(rendering, [cutter.cut(row) for row in rendering.tokens], renderer, statistics)
    warnings = [warning.model_dump(mode="json") for warning in statistics.warnings("file")]
    return {"rows": shown, "warnings": warnings}


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
        result = {"error": {"code": error.code, "message": error.message, "param": error.param}}
    (request.output / RESULT).write_text(json.dumps(result))


if __name__ == "__main__":
    main()
