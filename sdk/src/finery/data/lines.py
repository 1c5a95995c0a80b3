"""Lines of JSONL: UTF-8, one JSON value on each, blank ones skipped."""

from __future__ import annotations

import itertools
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from finery.data.strict_json import StrictReader, dotted
from finery.types.errors import Problem

MAX_LINE_BYTES = 16 * 2**20
BLANK: Any = object()
"""What a blank line is read as."""

MARK = b"\xef\xbb\xbf"
UTF16 = (b"\xff\xfe", b"\xfe\xff")
_SPACE = b" \t\r"
_PACKED = {b"\x1f\x8b": "gzip", b"PK\x03\x04": "zip", b"BZh": "bzip2", b"\xfd7zXZ": "xz", b"\x28\xb5\x2f\xfd": "zstd"}


class LineReader:
    """Reads lines one after the other."""

    def __init__(self) -> None:
        self._reader = StrictReader()

    def read(self, line: bytes) -> Any | Problem:
        """The value on a line without its end; `BLANK`; or what is wrong, without line and offset."""
        try:
            value, flaws = self._reader.read(line.decode())
        except ValueError as error:
            return _unreadable(line, error)
        if flaws:
            first = flaws[0]
            return Problem(code=first.code, path=dotted(first.path), message=first.message, hint="Mend the value.")
        return value


def _unreadable(line: bytes, error: ValueError) -> Any | Problem:
    if not line.strip(_SPACE):
        return BLANK
    if line.startswith(MARK):
        message = "expected a row, found a byte order mark, which may stand at the start of a file only"
        return Problem(code="byte_order_mark", message=message, hint="Join files without their byte order marks.")
    if isinstance(error, UnicodeDecodeError):
        packed = next((name for start, name in _PACKED.items() if line.startswith(start)), None)
        if packed is not None:
            message = f"expected JSONL or parquet, found bytes packed by {packed}"
            return Problem(code="invalid_utf8", message=message, hint="Unpack the file before the upload.")
        message = f"expected UTF-8, found the byte 0x{line[error.start]:02X} at {error.start} of the line"
        return Problem(code="invalid_utf8", message=message, hint="Save the file as UTF-8.")
    message = f"expected one JSON object on the line: {error}"[:300]
    hint = "Write each row with json.dumps, on one line of its own."
    if line.lstrip(_SPACE).startswith(b"["):
        hint = "Write each element of the list on one line of its own, without the list's brackets and commas."
    return Problem(code="invalid_json", message=message, hint=hint)


def rows(path: Path) -> Iterator[tuple[int, Any | Problem]]:
    """(line from 1, value or what is wrong with it) of a file that was checked: a line is held whole."""
    reader = LineReader()
    with path.open("rb") as file:
        for number, line in enumerate(file, 1):
            value = reader.read((line.removeprefix(MARK) if number == 1 else line).removesuffix(b"\n"))
            if value is not BLANK:
                yield number, value


def count(path: Path) -> int:
    """Lines that are not blank, which `rows` yields."""
    with path.open("rb") as file:
        first = file.readline().removeprefix(MARK)
        lines = itertools.chain((first,), file)  # one after the other: files may be larger than memory
        return sum(1 for line in lines if line.removesuffix(b"\n").strip(_SPACE))
