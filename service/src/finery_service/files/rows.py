"""The row check of uploaded files: pure, fed piece by piece, in bounded memory, one problem per bad line."""

from __future__ import annotations

from dataclasses import dataclass

from finery.data.strict_json import StrictReader, dotted
from finery.types.errors import Problem
from finery.types.files import FileFormat, FileStatus
from finery_service.files.chat import chat_problem

MAX_LINE_BYTES = 16 * 2**20
MAX_PROBLEMS = 100
"""Kept; all are counted."""

_MARK = b"\xef\xbb\xbf"
_UTF16 = (b"\xff\xfe", b"\xfe\xff")
_BLANK = b" \t\r"


@dataclass(frozen=True)
class Report:
    status: FileStatus
    format: FileFormat | None
    """None if no row was good."""
    rows: int
    """Good ones."""
    problems: tuple[Problem, ...]
    problem_count: int


class RowCheck:
    """Feed the file's bytes in order, in pieces of any size, then `finish`."""

    def __init__(self, *, max_line_bytes: int = MAX_LINE_BYTES) -> None:
        self._limit = max_line_bytes
        self._reader = StrictReader()
        self._line = bytearray()
        self._number, self._offset, self._read = 1, 0, 0
        self._rows = 0
        self._problems: list[Problem] = []
        self._count = 0
        self._is_too_long = False
        self._is_given_up = False

    def feed(self, piece: bytes) -> None:
        """Checks every line that ends in `piece`."""
        start = 0
        while not self._is_given_up:
            end = piece.find(b"\n", start)
            self._gather(piece[start : end if end >= 0 else len(piece)])
            if end < 0:
                break
            start = end + 1
            self._end_line(self._read + start)
        self._read += len(piece)

    def finish(self) -> Report:
        """The report; a last line without an end is a line."""
        if self._line or self._is_too_long:
            self._end_line(self._read)
        if not self._rows and not self._count:
            self._add(Problem(code="empty_file", message="expected at least one row, found none", hint="Add rows."))
        return Report(
            status="invalid" if self._count else "valid",
            format="chat" if self._rows else None,
            rows=self._rows,
            problems=tuple(self._problems),
            problem_count=self._count,
        )

    def _gather(self, piece: bytes) -> None:
        if self._is_too_long:
            return
        if len(self._line) + len(piece) > self._limit:
            self._is_too_long = True
            self._line.clear()
            return
        self._line += piece
        if self._number == 1 and self._line[:2] in _UTF16:
            message = "expected UTF-8, found the mark of UTF-16; the lines after it were not checked"
            self._add_here(Problem(code="invalid_utf8", message=message, hint="Save the file as UTF-8."))
            self._is_given_up = True
            self._line.clear()

    def _end_line(self, next_offset: int) -> None:
        line = bytes(self._line)
        self._line.clear()
        if self._number == 1:
            line = line.removeprefix(_MARK)
        problem = self._too_long() if self._is_too_long else self._line_problem(line)
        if problem is not None:
            self._add_here(problem)
        elif not self._is_too_long and line.strip(_BLANK):
            self._rows += 1
        self._is_too_long = False
        self._number += 1
        self._offset = next_offset

    def _line_problem(self, line: bytes) -> Problem | None:
        if line.startswith(_MARK):
            message = "expected a row, found a byte order mark, which may stand at the start of a file only"
            return Problem(code="byte_order_mark", message=message, hint="Join files without their byte order marks.")
        if not line.strip(_BLANK):
            return None
        try:
            row, flaws = self._reader.read(line.decode())
        except UnicodeDecodeError as error:
            message = f"expected UTF-8, found the byte 0x{line[error.start]:02X} at {error.start} of the line"
            return Problem(code="invalid_utf8", message=message, hint="Save the file as UTF-8.")
        except ValueError as error:
            message = f"expected one JSON object on the line: {error}"[:300]
            return Problem(code="invalid_json", message=message, hint="Write each row on one line of its own.")
        if flaws:
            first = flaws[0]
            return Problem(code=first.code, path=dotted(first.path), message=first.message, hint="Mend the value.")
        return chat_problem(row, others_are_chat=self._rows > 0)

    def _too_long(self) -> Problem:
        message = f"expected a line of at most {self._limit} bytes, found a longer one"
        return Problem(code="line_too_long", message=message, hint="Split the row.")

    def _add_here(self, problem: Problem) -> None:
        self._add(problem.model_copy(update={"line": self._number, "offset": self._offset}))

    def _add(self, problem: Problem) -> None:
        self._count += 1
        if len(self._problems) < MAX_PROBLEMS:
            self._problems.append(problem)
