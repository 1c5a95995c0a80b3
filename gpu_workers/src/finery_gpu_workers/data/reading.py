"""Rows of an uploaded file, one at a time, with their numbers.

Memory holds one line, or one batch of a parquet file.
"""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

from finery.data import lines, parquet
from finery.data.rows import Row, read_row
from finery.types.errors import Problem
from finery.types.files import FileEncoding, FileFormat


def read_rows(
    path: Path, encoding: FileEncoding, first: int = 1
) -> Iterator[tuple[int, FileFormat | None, Row | Problem]]:
    """(line, format of the file as far as it is known, row or what is wrong with it), from line `first` on.

    A parquet file's rows count from 1 as lines do; blank lines of a JSONL file are skipped, but count. The first good
    row decides the format; it is what is expected of the others.
    """
    format_: FileFormat | None = None
    for line, value in parquet.rows(path) if encoding == "parquet" else lines.rows(path):
        if 0 < line < first:
            continue
        read = value if isinstance(value, Problem) else read_row(value, format_)
        if isinstance(read, Problem):
            yield line, format_, read
        else:
            format_ = read[0]
            yield line, format_, read[1]
