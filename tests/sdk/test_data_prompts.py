"""Prompts with what graders need: how they are told from conversations, and the first thing wrong with one."""

from __future__ import annotations

import math
from pathlib import Path
from typing import Any

import pytest

from finery.data import lines
from finery.data.rows import PromptRow, read_row
from finery.types.errors import Problem

SYSTEM = {"role": "system", "content": "s"}
USER, OK = {"role": "user", "content": "hi"}, {"role": "assistant", "content": "ok"}
TOOL = {"type": "function", "function": {"name": "f"}}


def format_of(row: Any, expected: Any = None) -> str:
    found = read_row(row, expected)
    return found.code if isinstance(found, Problem) else found[0]


@pytest.mark.parametrize(
    ("row", "format_"),
    [
        ({"prompt": "p"}, "prompts"),
        ({"prompt": "p", "answer": 7}, "prompts"),
        ({"prompt": [USER]}, "prompts"),
        ({"messages": [USER], "answer": None}, "prompts"),
        ({"messages": [USER, OK, USER], "answer": 1}, "prompts"),
        ({"prompt": "p", "completion": "c"}, "completion"),
        ({"messages": [USER, OK], "answer": 1}, "chat"),
        ({"messages": [USER]}, "last_message_not_assistant"),
        ({"messages": [USER], "tools": [TOOL]}, "last_message_not_assistant"),
        ({"prompt": "p", "text": "t"}, "mixed_formats"),
        ({"prompt": "p", "messages": [USER]}, "mixed_formats"),
    ],
)
def test_a_prompt_is_told_from_what_is_learned_as_it_is(row: dict[str, Any], format_: str) -> None:
    assert format_of(row) == format_


def test_the_first_rows_format_is_the_files() -> None:
    assert format_of({"prompt": "p"}, "completion") == "wrong_type", "its completion is missing"
    assert format_of({"messages": [USER], "id": 7}, "chat") == "last_message_not_assistant"
    assert format_of({"messages": [USER, OK], "answer": 1}, "prompts") == "last_message_not_user"
    assert format_of({"messages": [USER]}, "prompts") == "missing_field"
    assert format_of({"prompt": "p"}, "chat") == "mixed_formats"
    assert format_of({"text": "t"}, "prompts") == "mixed_formats"


def test_conversations_behind_one_without_an_answer_say_where_to_look() -> None:
    found = read_row({"messages": [USER, OK], "id": 2}, "prompts")
    assert isinstance(found, Problem)
    assert "the first lacks its answer" in (found.hint or "")


def test_the_item_is_the_whole_row() -> None:
    row: dict[str, Any] = {"messages": [SYSTEM, {**USER, "name": None}], "tools": [TOOL], "a": {"b": [None, 1.5]}}
    assert read_row(row) == ("prompts", PromptRow((SYSTEM, USER), None, (TOOL,), row, "messages"))
    text = {"prompt": "p", "functions": 1, "labels": "yes"}
    assert read_row(text) == ("prompts", PromptRow(text="p", item=text))


@pytest.mark.parametrize(
    ("row", "path", "code"),
    [
        ({"prompt": 7}, "prompt", "wrong_type"),
        ({"prompt": ""}, "prompt", "empty_prompt"),
        ({"prompt": "a\0"}, "prompt", "nul_character"),
        ({"prompt": []}, "prompt", "last_message_not_user"),
        ({"prompt": [USER, OK]}, "prompt[1]", "last_message_not_user"),
        ({"prompt": [SYSTEM]}, "prompt[0]", "last_message_not_user"),
        ({"prompt": [USER, SYSTEM, USER]}, "prompt[1].role", "role_order"),
        ({"prompt": [{"role": "human", "content": "a"}]}, "prompt[0].role", "unknown_role"),
        ({"prompt": [{"role": "tool", "content": "a"}]}, "prompt", "no_user_message"),
        ({"prompt": [USER, {"role": "tool", "content": "a"}]}, "prompt[1].tool_call_id", "unmatched_tool_call_id"),
        ({"prompt": "p", "tools": [TOOL]}, "tools", "unsupported_field"),
        ({"prompt": [USER], "tools": [7]}, "tools[0]", "wrong_type"),
        ({"prompt": "p", "answer": math.nan}, "answer", "invalid_json"),
        ({"messages": [USER], "answer": {"x": [1, math.inf]}}, "answer.x[1]", "invalid_json"),
        ({"prompt": "p", "answer": "\ud83d"}, "answer", "invalid_unicode"),
    ],
)
def test_what_is_no_prompt(row: dict[str, Any], path: str, code: str) -> None:
    found = read_row(row)
    assert isinstance(found, Problem)
    assert (found.path, found.code) == (path, code)
    assert found.hint


@pytest.mark.parametrize(
    "content", [b"", b"\n", b'{"a":1}\n\n \t\r\n{"b":2}', b"\xef\xbb\xbf\n7\n", b"\xef\xbb\xbf7\r\n8\n", b"{\n7"]
)
def test_lines_are_counted_as_they_are_read(tmp_path: Path, content: bytes) -> None:
    path = tmp_path / "rows.jsonl"
    path.write_bytes(content)
    assert lines.count(path) == len(list(lines.rows(path)))
