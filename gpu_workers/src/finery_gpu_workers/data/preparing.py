"""Rendered rows into the sets of a job: cut, counted, written."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from functools import partial
from itertools import islice
from typing import Any

from finery.data import lines, parquet
from finery.data.rows import PromptRow
from finery.types import data as types
from finery.types.data import SetReport
from finery.types.errors import Problem
from finery_gpu_workers.data.chat import RowError
from finery_gpu_workers.data.cutting import Cutter
from finery_gpu_workers.data.overlap import Overlap, Repeats
from finery_gpu_workers.data.prepared import SetWriter
from finery_gpu_workers.data.prompts import ItemWriter
from finery_gpu_workers.data.reading import read_rows
from finery_gpu_workers.data.rendering import Renderer, Rendering
from finery_gpu_workers.data.request import Progress, Request, Upload
from finery_gpu_workers.data.samples import Prompted
from finery_gpu_workers.data.statistics import SetStatistics
from finery_gpu_workers.data.tokens import TokenRow

LISTED_PROBLEMS = 100
IN_HELD_OUT = "in_held_out"


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
    sets: dict[str, dict[str, Any]] = field(default_factory=dict)
    """What the index says of each set."""

    def all(self) -> dict[str, Any] | None:
        """What is wrong, if the rows of a set cannot be used."""
        names = ("validation", "train") if self.request.method == "rl" else tuple(self.request.files)
        for name in names:
            problems = self._prompts(name) if self.request.method == "rl" else self._file(name)
            if problems.count:
                return {"problems": problems.first, "count": problems.count, "set": name}
            self.overlap.close()
        return None

    # ---- rows and pairs

    def _file(self, name: str) -> Problems:
        """One uploaded file as one set."""
        writer = SetWriter(self.request.output, name, pairs=self.request.method == "dpo")
        statistics, problems = SetStatistics(), Problems()
        for rendering in self._rendered(name, 0, None):
            if rendering.problem is None:
                try:
                    self._row(rendering, writer, statistics)
                except RowError as error:
                    rendering.refuse(error)
            if rendering.problem:
                problems.add(rendering.problem)
        self._close(name, writer, statistics)
        return problems

    def _row(self, rendering: Rendering, writer: SetWriter, statistics: SetStatistics) -> None:
        kept = self.cutter.cut_all(rendering.tokens, rendering.kind)
        for sample in kept:
            if not isinstance(sample, str):
                writer.add(sample, rendering.line)
        count(rendering, kept, self.renderer, statistics)
        for code in self.overlap.codes(rendering.tokens):
            statistics.note(code, rendering.line)

    def _close(self, name: str, writer: SetWriter, statistics: SetStatistics) -> None:
        self.sets[name] = writer.close()
        self.reports[name] = statistics.report(self.sets[name]["digest"])
        self.warnings += statistics.warnings(self.request.params[name])

    # ---- prompts

    def _prompts(self, name: str) -> Problems:
        """One set of prompts; `validation`, the held-out ones, comes first, so that `train` can do without them."""
        wanted = self.request.held_out if name == "validation" else None
        problems = Problems()
        if wanted == 0:
            return problems
        writer, items = SetWriter(self.request.output, name), ItemWriter(self.request.output, name)
        statistics, repeats = SetStatistics(), Repeats()
        for place, rendering in self._places(name):
            if rendering.problem:
                problems.add(rendering.problem)
                continue
            assert isinstance(rendering.row, PromptRow)
            kept = self._kept(rendering, statistics, is_held_out=name == "validation")
            count(rendering, [kept], self.renderer, statistics)
            if isinstance(kept, str):
                continue
            self.renderer.note_end_of_turn(rendering.row)
            repeats.add([kept], rendering.line)
            writer.add(kept, rendering.line)
            items.add(place, rendering.row)
            if writer.samples == wanted:
                break
        statistics.note_all("prompt_repeated", repeats.lines())
        self._close(name, writer, statistics)
        self.sets[name]["items"] = items.close()
        return problems

    def _kept(self, rendering: Rendering, statistics: SetStatistics, *, is_held_out: bool) -> TokenRow | str:
        (prompt,) = self.cutter.cut_all(rendering.tokens, "prompt")
        if isinstance(prompt, str):
            return prompt
        if self.overlap.codes([prompt]) and not is_held_out:
            statistics.note("prompt_held_out", rendering.line)
            return IN_HELD_OUT
        return prompt

    def _places(self, name: str) -> Iterator[tuple[int, Rendering]]:
        """The rows of a set with their places in the environment: those of one file, then those of the other."""
        upload, held_out = self.request.files["train"], self.request.held_out
        if "validation" in self.request.files:
            first = count_rows(upload) if name == "validation" else 0
            yield from enumerate(self._rendered(name, 0, None), first)
            return
        border = max(0, count_rows(upload) - held_out) if held_out else None
        if name == "validation":
            assert border is not None
            yield from enumerate(self._rendered("train", border, None), border)
        else:
            yield from enumerate(self._rendered("train", 0, border))

    def _rendered(self, name: str, first: int, end: int | None) -> Iterator[Rendering]:
        """Rows `first` up to `end` of a file."""
        upload, number = self.request.files[name], list(self.request.files).index(name)
        rows = islice(read_rows(upload.path, upload.encoding), first, end)
        return self.renderer.render(rows, partial(self.progress.set, number), self.request.params[name])


def count_rows(upload: Upload) -> int:
    return parquet.count(upload.path) if upload.encoding == "parquet" else lines.count(upload.path)


def count(rendering: Rendering, kept: Sequence[TokenRow | str], renderer: Renderer, statistics: SetStatistics) -> None:
    """One row, and what is to be warned of in it."""
    statistics.format = rendering.format or statistics.format
    statistics.add(rendering.line, rendering.tokens, kept, unrolled=rendering.unrolled)
    statistics.note_special(renderer.special_in_content(rendering), rendering.line)
    for code in rendering.notes:
        statistics.note(code, rendering.line)
    for sample in rendering.samples:
        if isinstance(sample, Prompted) and sample.rewritten is not None:
            statistics.note_rewritten(sample.rewritten, rendering.line)
