"""The row check of data files, in bounded memory, with one problem for each bad row: what an upload goes through."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from finery.data import parquet
from finery.data.lines import BLANK, MARK, MAX_LINE_BYTES, UTF16, LineReader
from finery.data.rows import read_row
from finery.types.errors import Problem
from finery.types.files import FileEncoding, FileFormat, FileStatus

MAX_PROBLEMS = 100
"""Kept; all are counted."""
_PIECE = 2**20

Progress = Callable[[int, int], None]
"""Bytes checked, bytes in all."""


@dataclass(frozen=True)
class Report:
    status: FileStatus
    format: FileFormat | None
    """None if no row was good."""
    encoding: FileEncoding
    rows: int
    """Good ones."""
    problems: tuple[Problem, ...]
    problem_count: int


class Tally:
    """What the rows of a file add up to."""

    def __init__(self, encoding: FileEncoding) -> None:
        self._encoding = encoding
        self._format: FileFormat | None = None
        self._rows = 0
        self._problems: list[Problem] = []
        self._count = 0

    def value(self, value: Any) -> Problem | None:
        """Takes a row in; what is wrong with it is for the caller to place and `add`."""
        found = read_row(value, self._format)
        if isinstance(found, Problem):
            return found
        if self._format is None:
            self._format = found[0]
        self._rows += 1
        return None

    def add(self, problem: Problem, line: int | None = None, offset: int | None = None) -> None:
        self._count += 1
        if len(self._problems) < MAX_PROBLEMS:
            self._problems.append(problem.model_copy(update={"line": line, "offset": offset}))

    def report(self) -> Report:
        if not self._rows and not self._count:
            self.add(Problem(code="empty_file", message="expected at least one row, found none", hint="Add rows."))
        return Report(
            status="invalid" if self._count else "valid",
            format=self._format,
            encoding=self._encoding,
            rows=self._rows,
            problems=tuple(self._problems),
            problem_count=self._count,
        )


class RowCheck:
    """Of JSONL: feed the file's bytes in order, in pieces of any size, then `finish`."""

    def __init__(self, *, max_line_bytes: int = MAX_LINE_BYTES) -> None:
        self._limit = max_line_bytes
        self._reader = LineReader()
        self._tally = Tally("jsonl")
        self._line = bytearray()
        """The beginning of a line that the next piece goes on with."""
        self._number, self._offset, self._read = 1, 0, 0
        self._is_too_long = False
        self._is_given_up = False

    def feed(self, piece: bytes) -> None:
        """Checks every line that ends in `piece`."""
        start = 0
        while not self._is_given_up:
            end = piece.find(b"\n", start)
            if end < 0:
                self._gather(piece[start:])
                break
            if self._line or self._is_too_long or self._number == 1 or end - start > self._limit:
                self._gather(piece[start:end])
                self._end_line(bytes(self._line))
            else:
                self._end_line(piece[start:end])
            start = end + 1
            self._offset = self._read + start
        self._read += len(piece)

    def finish(self) -> Report:
        """The report; a last line without an end is a line."""
        if self._line or self._is_too_long:
            self._end_line(bytes(self._line))
        return self._tally.report()

    def _gather(self, piece: bytes) -> None:
        if self._is_too_long:
            return
        if self._number == 1 and (self._line[:2] + piece[:2])[:2] in UTF16:
            message = "expected UTF-8, found the mark of UTF-16; the lines after it were not checked"
            problem = Problem(code="invalid_utf8", message=message, hint="Save the file as UTF-8.")
            self._tally.add(problem, self._number, self._offset)
            self._is_given_up = True
            self._line.clear()
        elif len(self._line) + len(piece) > self._limit:
            self._is_too_long = True
            self._line.clear()
        else:
            self._line += piece

    def _end_line(self, line: bytes) -> None:
        if self._is_given_up:
            return
        problem = self._line_problem(line.removeprefix(MARK) if self._number == 1 else line)
        if problem is not None:
            self._tally.add(problem, self._number, self._offset)
        self._line.clear()
        self._is_too_long = False
        self._number += 1

    def _line_problem(self, line: bytes) -> Problem | None:
        if self._is_too_long:
            message = f"expected a line of at most {self._limit} bytes, found a longer one"
            return Problem(code="line_too_long", message=message, hint="Split the row.")
        value = self._reader.read(line)
        if value is BLANK:
            return None
        return value if isinstance(value, Problem) else self._tally.value(value)


def check_parquet(path: Path, on_progress: Progress | None = None) -> Report:
    """Raises as `parquet.rows` does. Problems carry the row's number, from 1, as their line."""
    tally = Tally("parquet")
    size = path.stat().st_size
    count = parquet.count(path) if on_progress else 0
    for number, value in parquet.rows(path):
        problem = value if isinstance(value, Problem) else tally.value(value)
        if problem is not None:
            tally.add(problem, number or None)
        if on_progress and number % 1024 == 0:
            on_progress(size * number // max(1, count), size)
    if on_progress:
        on_progress(size, size)
    return tally.report()


def check_file(path: Path, on_progress: Progress | None = None) -> Report:
    """What an upload of the file would be told; parquet or JSONL by its first bytes. Raises OSError."""
    size, done = path.stat().st_size, 0
    check = RowCheck()
    with path.open("rb") as file:
        while piece := file.read(_PIECE):
            if done == 0 and parquet.is_parquet(piece):
                return check_parquet(path, on_progress)
            check.feed(piece)
            done += len(piece)
            if on_progress:
                on_progress(done, size)
    return check.finish()
