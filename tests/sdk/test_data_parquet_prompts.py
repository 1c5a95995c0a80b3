"""Columns of prompts and pairs."""

from __future__ import annotations

from collections.abc import Callable
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from finery.data import parquet
from finery.data.check import check_parquet
from finery.types.errors import Problem

USER, OK = {"role": "user", "content": "hi"}, {"role": "assistant", "content": "ok"}
AT = datetime(2026, 1, 1, tzinfo=UTC)
Write = Callable[[list[dict[str, Any]]], Path]


@pytest.fixture
def write(tmp_path: Path) -> Write:
    def _write(rows: list[dict[str, Any]]) -> Path:
        path = tmp_path / "rows.parquet"
        pq.write_table(pa.table({name: [row[name] for row in rows] for name in rows[0]}), path)
        return path

    return _write


def first(path: Path) -> Problem:
    return check_parquet(path).problems[0]


@pytest.mark.parametrize(
    ("row", "path"),
    [({"prompt": "a", "at": AT}, "at"), ({"prompt": "a", "meta": {"raw": [b"x"]}}, "meta.raw[]")],
)
def test_columns_that_json_cannot_hold_are_one_problem_of_the_file(
    write: Write, row: dict[str, Any], path: str
) -> None:
    (problem,) = check_parquet(write([row] * 3)).problems
    assert (problem.line, problem.code, problem.path) == (None, "wrong_type", path)


def test_columns_that_nobody_asked_for_are_read_of_prompts_first(write: Write) -> None:
    rows: list[dict[str, Any]] = [{"messages": [USER, OK], "at": AT}]
    assert [value for _, value in parquet.rows(write(rows))] == [{"messages": [USER, OK]}]
    assert first(write([{"messages": [USER], "at": AT}])).path == "at"


def test_answers_that_are_null_make_no_row_a_prompt(write: Write) -> None:
    empty: dict[str, Any] = {"prompt": "p", "completion": None}
    assert first(write([empty, {"prompt": "p", "completion": "c"}])).path == "completion"
    pair = {"messages": [USER], "chosen": "a", "rejected": "b"}
    report = check_parquet(write([pair | {"chosen": None}, pair | {"chosen": None, "rejected": None}, pair]))
    assert [(p.line, p.code, p.path) for p in report.problems] == [(n, "wrong_type", "chosen") for n in (1, 2)]
    assert report.format == "preference"


def test_numbers_that_json_does_not_have_are_named_in_items(write: Write) -> None:
    report = check_parquet(write([{"prompt": "p", "score": 1.0}, {"prompt": "p", "score": float("nan")}]))
    assert [(p.line, p.code, p.path) for p in report.problems] == [(2, "invalid_json", "score")]
