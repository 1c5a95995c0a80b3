"""What a training row may be, format by format, and the first thing wrong with one."""

from __future__ import annotations

import json
from typing import Any

import pytest

from finery.data.rows import ChatRow, CompletionRow, TextRow, TokensRow, read_row
from finery.types.errors import Problem

USER, OK = {"role": "user", "content": "hi"}, {"role": "assistant", "content": "ok"}


def chat(*messages: Any, **more: Any) -> dict[str, Any]:
    return {"messages": list(messages), **more}


def good(value: Any) -> Any:
    found = read_row(value)
    assert not isinstance(found, Problem), found
    return found[1]


def problem(value: Any) -> Problem:
    found = read_row(value)
    assert isinstance(found, Problem), found
    assert found.message, "it says what was expected and found"
    assert found.hint, "it says what to do"
    assert (found.line, found.offset) == (None, None)
    return found


def place(value: Any) -> tuple[str, str]:
    found = problem(value)
    return found.path, found.code


def test_four_formats() -> None:
    assert read_row(chat(USER, OK)) == ("chat", ChatRow((USER, OK)))
    assert read_row({"prompt": "1+1=", "completion": "2"}) == ("completion", CompletionRow("1+1=", "2"))
    assert read_row({"text": "t"}) == ("text", TextRow("t"))
    assert read_row({"input_ids": [5, 0]}) == ("tokens", TokensRow((5, 0), (True, True)))


def test_other_keys_of_a_row_are_its_owners_business() -> None:
    assert good(chat(USER, OK, id=7, labels=["sports"], source=None)) == ChatRow((USER, OK))
    assert good({"text": "t", "url": "u", "meta": {"a": [1]}}) == TextRow("t")


@pytest.mark.parametrize(
    ("row", "path", "code"),
    [
        (chat(USER, OK, text="t"), "", "mixed_formats"),
        ({"text": "t", "input_ids": [1]}, "", "mixed_formats"),
        (chat(USER, rejected="r"), "chosen", "wrong_type"),
        (chat(USER, OK, functions=[]), "functions", "unsupported_field"),
        ({"text": "t", "tools": [{}]}, "tools", "unsupported_field"),
        ({"prompt": "p", "completion": "c", "tools": [{}]}, "tools", "unsupported_field"),
        ({"prompt": "p", "completion": None}, "completion", "wrong_type"),
        ({"completion": "c"}, "prompt", "wrong_type"),
        ({"prompt": "p", "completion": [OK]}, "completion", "wrong_type"),
        ({"prompt": [USER], "completion": "c"}, "completion", "wrong_type"),
        ({"prompt": None, "completion": "c"}, "prompt", "wrong_type"),
        ({"text": 7}, "text", "wrong_type"),
        ({"text": "a\0b"}, "text", "nul_character"),
        ({"prompt": "a", "completion": "\ud83d"}, "completion", "invalid_unicode"),
        (chat(USER, {"role": "assistant", "content": "\ude00"}), "messages[1].content", "invalid_unicode"),
    ],
)
def test_rows_that_are_no_rows(row: Any, path: str, code: str) -> None:
    assert place(row) == (path, code)


@pytest.mark.parametrize(
    ("row", "word"),
    [
        ({"conversations": []}, "conversations"),
        ({"instruction": "a", "output": "b"}, "completion"),
        (chat(USER, OK, functions=[]), "tools"),
        (chat({"role": "human", "content": "a"}), "user"),
        (chat({"role": "gpt", "content": "a"}), "assistant"),
        (chat({"role": "Assistant", "content": "a"}), "assistant"),
    ],
)
def test_hints_name_what_other_formats_call_it(row: Any, word: str) -> None:
    assert word in problem(row).hint


# ---- prompt and completion as messages


def test_prompt_and_completion_may_be_messages() -> None:
    row = {"prompt": [USER, OK, USER], "completion": [{**OK, "weight": 0}, USER, OK], "tools": []}
    assert read_row(row) == ("completion", ChatRow((USER, OK, USER, OK, USER, OK), None, frozenset({3}), 3))


@pytest.mark.parametrize(
    ("prompt", "completion", "path", "code"),
    [
        ([USER], [], "completion", "role_order"),
        ([USER], [USER, OK], "completion", "role_order"),
        ([], [OK], "completion", "no_user_message"),
        ([USER], [OK, USER], "completion", "last_message_not_assistant"),
        ([USER, {"role": "system", "content": "s"}], [OK], "prompt[1].role", "role_order"),
        ([USER], [OK, {"role": "system", "content": "s"}, OK], "completion[1].role", "role_order"),
        ([{**USER, "weight": 1}], [OK], "prompt[0].weight", "invalid_weight"),
        ([USER], [{**OK, "weight": 2}], "completion[0].weight", "invalid_weight"),
        ([USER], [{**OK, "content": 7}], "completion[0].content", "wrong_type"),
    ],
)
def test_problems_of_prompt_and_completion_are_placed(prompt: Any, completion: Any, path: str, code: str) -> None:
    assert place({"prompt": prompt, "completion": completion}) == (path, code)


# ---- content


def test_a30_text_parts_are_the_same_as_their_text() -> None:
    parts = [{"type": "text", "text": "h"}, {"type": "text", "text": "i", "image_url": None}]
    assert read_row(chat({"role": "user", "content": parts}, OK)) == read_row(chat(USER, OK))
    contents: tuple[Any, Any] = ([], "")
    empty = [chat({"role": "user", "content": content}, OK) for content in contents]
    assert read_row(empty[0]) == read_row(empty[1]) == ("chat", ChatRow(({"role": "user", "content": ""}, OK)))


@pytest.mark.parametrize(
    ("part", "path", "code", "word"),
    [
        ({"type": "image", "image": "x"}, "content[1]", "unsupported_content_part", "'image'"),
        ({"type": "image_url", "image_url": {}}, "content[1]", "unsupported_content_part", "'image_url'"),
        ({"text": "i"}, "content[1]", "unsupported_content_part", "part 1"),
        ("i", "content[1]", "unsupported_content_part", "a text"),
        ({"type": "text", "text": None}, "content[1].text", "wrong_type", "null"),
        ({"type": "text", "text": "i", "cache": 1}, "content[1]", "unknown_field", "'cache'"),
    ],
)
def test_a30_other_parts_are_named_with_message_and_part(part: Any, path: str, code: str, word: str) -> None:
    found = problem(chat({"role": "user", "content": [{"type": "text", "text": "h"}, part]}, OK))
    assert (found.path, found.code) == (f"messages[0].{path}", code)
    assert word in found.message
    if code == "unsupported_content_part":
        assert "message 0, part 1" in found.message


def test_null_content_needs_tool_calls() -> None:
    call = {"id": "c1", "type": "function", "function": {"name": "f", "arguments": "{}"}}
    calling = {"role": "assistant", "content": None, "tool_calls": [call]}
    assert good(chat(USER, calling)).messages[1]["content"] == ""
    del calling["content"]
    assert good(chat(USER, calling)).messages[1]["content"] == ""
    assert place(chat(USER, {"role": "assistant", "content": None})) == ("messages[1].content", "wrong_type")
    assert place(chat(USER, {**calling, "tool_calls": []})) == ("messages[1].content", "wrong_type")


# ---- reasoning, weights, other fields


@pytest.mark.parametrize("key", ["reasoning_content", "reasoning", "thinking"])
def test_reasoning_has_one_name_for_templates(key: str) -> None:
    messages = good(chat(USER, {**OK, key: "r"})).messages
    assert messages == (USER, {**OK, "reasoning_content": "r"})
    assert good(chat(USER, {**OK, key: None})).messages == (USER, OK)
    assert place(chat({**USER, key: "r"}, OK)) == ("messages[0]", "unknown_field")
    assert place(chat(USER, {**OK, key: 1})) == (f"messages[1].{key}", "wrong_type")


def test_reasoning_under_two_names_is_refused() -> None:
    assert place(chat(USER, {**OK, "reasoning": "a", "thinking": "a"})) == ("messages[1]", "duplicate_key")


def test_unknown_fields_are_named_and_empty_ones_say_nothing() -> None:
    found = problem(chat(USER, {**OK, "wieght": 0}))
    assert (found.path, found.code) == ("messages[1]", "unknown_field")
    assert "'wieght'" in found.message
    dumped: dict[str, Any] = {**OK, "refusal": None, "function_call": None, "tool_calls": None, "annotations": []}
    assert good(chat({**USER, "name": None}, dumped)).messages == (USER, OK)


def test_nothing_is_merged_moved_or_dropped() -> None:
    messages = [{"role": "developer", "content": "d"}, USER, USER, OK, OK]
    assert json.dumps(good(chat(*messages)).messages) == json.dumps(messages)


# ---- tokens


def test_labels_say_which_tokens_are_trained() -> None:
    row = {"input_ids": [7, 8, 8], "labels": [-100, 8, -100], "attention_mask": [1, 1, 1]}
    assert good(row) == TokensRow((7, 8, 8), (False, True, False))
    assert good({"input_ids": [7], "labels": None}) == TokensRow((7,), (True,))


@pytest.mark.parametrize(
    ("row", "path", "code"),
    [
        ({"input_ids": []}, "input_ids", "invalid_input_ids"),
        ({"input_ids": [1, -1]}, "input_ids[1]", "invalid_input_ids"),
        ({"input_ids": [1, 2**31]}, "input_ids[1]", "invalid_input_ids"),
        ({"input_ids": [1, True]}, "input_ids[1]", "wrong_type"),
        ({"input_ids": [1, 2.0]}, "input_ids[1]", "wrong_type"),
        ({"input_ids": "1 2"}, "input_ids", "wrong_type"),
        ({"input_ids": [[1]]}, "input_ids[0]", "wrong_type"),
        ({"input_ids": [1, 2], "labels": [1]}, "labels", "invalid_labels"),
        ({"input_ids": [1, 2], "labels": [2, -100]}, "labels[0]", "invalid_labels"),
        ({"input_ids": [1, 2], "labels": [1, -1]}, "labels[1]", "invalid_labels"),
        ({"input_ids": [1, 2], "labels": [1, None]}, "labels[1]", "wrong_type"),
        ({"input_ids": [1, 2], "attention_mask": [1, 0]}, "attention_mask", "invalid_attention_mask"),
        ({"input_ids": [1, 2], "attention_mask": [1]}, "attention_mask", "invalid_attention_mask"),
    ],
)
def test_token_ids_and_labels_that_cannot_be(row: Any, path: str, code: str) -> None:
    assert place(row) == (path, code)


def test_a_row_without_any_format_is_shown_one_of_the_files_own() -> None:
    found = read_row({"txt": "a"}, "text")
    wanted = ("missing_messages", "text", 'Write {"text": "…"}.')
    assert isinstance(found, Problem)
    assert (found.code, found.path, found.hint) == wanted
