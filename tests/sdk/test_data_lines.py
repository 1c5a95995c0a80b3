"""Rows of JSONL files as the workers read them."""

from __future__ import annotations

import gzip
import json
import tracemalloc
from pathlib import Path
from typing import Any

import pytest

from finery.data import lines
from finery.types.errors import Problem

ROWS: list[dict[str, Any]] = [{"text": "a"}, {"text": "ä😀\u2028", "meta": {"x": None}}, {"text": "b", "n": 1.5}]


def write(path: Path, *rows: bytes) -> Path:
    path.write_bytes(b"".join(rows))
    return path


def dumped(row: dict[str, Any]) -> bytes:
    return json.dumps(row, ensure_ascii=False).encode() + b"\n"


def test_a01_rows_are_the_same_with_and_without_a_mark(tmp_path: Path) -> None:
    content = [dumped(row) for row in ROWS]
    plain = list(lines.rows(write(tmp_path / "plain", *content)))
    assert plain == list(enumerate(ROWS, 1))
    assert list(lines.rows(write(tmp_path / "marked", b"\xef\xbb\xbf", *content))) == plain
    assert [list(row) for _, row in plain] == [list(row) for row in ROWS], "the same keys, in their order"


@pytest.mark.parametrize("end", [b"\n", b"\r\n"])
def test_blank_lines_count_and_are_no_rows(tmp_path: Path, end: bytes) -> None:
    path = write(tmp_path / "rows", b'{"text":"a"}', end, b" \t", end, end, b'{"text":"b"}')
    assert list(lines.rows(path)) == [(1, {"text": "a"}), (4, {"text": "b"})]


def test_what_is_wrong_with_a_line_stands_in_its_place(tmp_path: Path) -> None:
    path = write(
        tmp_path / "rows", b'{"text":"a"}\n', b'{"a":1,"a":2}\n', b"\xff\n", b"\xef\xbb\xbf{}\n", b"{}\n", b"{"
    )
    found = [(number, value.code if isinstance(value, Problem) else value) for number, value in lines.rows(path)]
    assert found == [
        (1, {"text": "a"}),
        (2, "duplicate_key"),
        (3, "invalid_utf8"),
        (4, "byte_order_mark"),
        (5, {}),
        (6, "invalid_json"),
    ]


@pytest.mark.parametrize(
    ("line", "hint"),
    [
        (gzip.compress(b'{"text": "a"}', mtime=0), "Unpack the file before the upload."),
        (b'[{"text": "a"},', "Write each element of the list on one line of its own"),
        (b"{'text': 'a'}", "Write each row with json.dumps"),
    ],
)
def test_the_hint_names_the_usual_mistake(line: bytes, hint: str) -> None:
    found = lines.LineReader().read(line)
    assert isinstance(found, Problem)
    assert (found.hint or "").startswith(hint)


def test_lines_are_counted_one_after_the_other(tmp_path: Path) -> None:
    path = write(
        tmp_path / "rows", b"\xef\xbb\xbf \r\n", *[b'{"text": "%s"}\n' % (b"x" * 1000)] * 10_000, b"\t\n", b"{}"
    )
    tracemalloc.start()
    try:
        counted = lines.count(path)
        peak = tracemalloc.get_traced_memory()[1]
    finally:
        tracemalloc.stop()
    assert counted == sum(1 for _ in lines.rows(path)) == 10_001
    assert peak < 2**20, f"a file of {path.stat().st_size} bytes took {peak}"
