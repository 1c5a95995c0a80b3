"""Pairs of answers: their shapes, and the first thing wrong with one."""

from __future__ import annotations

from typing import Any

import pytest

from finery.data.rows import ChatRow, CompletionRow, PreferenceRow, read_row
from finery.types.errors import Problem

SYSTEM = {"role": "system", "content": "s"}
USER, OK, NO = {"role": "user", "content": "hi"}, *({"role": "assistant", "content": text} for text in ("ok", "no"))
CALL = {"id": "c1", "type": "function", "function": {"name": "f", "arguments": "{}"}}
CALLING = {"role": "assistant", "content": None, "tool_calls": [CALL]}
ANSWERED = {"role": "tool", "tool_call_id": "c1", "content": "7"}
TOOL = {"type": "function", "function": {"name": "f"}}


def problem(value: Any, expected: Any = None) -> Problem:
    found = read_row(value, expected)
    assert isinstance(found, Problem), found
    assert found.message
    assert found.hint
    return found


def sides(*prompt: Any, chosen: Any = OK, rejected: Any = NO, tools: Any = None) -> tuple[ChatRow, ChatRow]:
    count = len(prompt)
    return ChatRow((*prompt, chosen), tools, frozenset(), count), ChatRow(
        (*prompt, rejected), tools, frozenset(), count
    )


@pytest.mark.parametrize(
    ("row", "key"),
    [
        ({"prompt": [SYSTEM, USER], "chosen": [OK], "rejected": [NO]}, "prompt"),
        ({"prompt": [SYSTEM, USER], "chosen": "ok", "rejected": "no"}, "prompt"),
        ({"messages": [SYSTEM, USER], "chosen": "ok", "rejected": "no", "id": 7}, "messages"),
        ({"messages": [SYSTEM, USER], "chosen": [OK], "rejected": [NO]}, "messages"),
        ({"chosen": [SYSTEM, USER, OK], "rejected": [SYSTEM, USER, NO]}, None),
    ],
)
def test_the_same_pair_in_all_shapes(row: dict[str, Any], key: Any) -> None:
    assert read_row(row) == ("preference", PreferenceRow(*sides(SYSTEM, USER), prompt_key=key))


def test_texts_stay_texts() -> None:
    row = {"prompt": "1+1=", "chosen": " 2", "rejected": " 3"}
    pair = PreferenceRow(CompletionRow("1+1=", " 2"), CompletionRow("1+1=", " 3"))
    assert read_row(row) == ("preference", pair)


def test_the_prompt_of_whole_conversations_is_the_longest_beginning_that_they_share() -> None:
    chosen, rejected = [USER, OK, USER, OK], [USER, OK, USER, NO]
    assert read_row({"chosen": chosen, "rejected": rejected}) == (
        "preference",
        PreferenceRow(*sides(USER, OK, USER), prompt_key=None),
    )
    later = [USER, OK, {"role": "user", "content": "other"}, NO]
    found = problem({"chosen": chosen, "rejected": later})
    assert (found.code, found.path) == ("role_order", "chosen[2]")


def test_tools_belong_to_both_answers_which_may_have_several_turns() -> None:
    row = {"messages": [USER], "chosen": [CALLING, ANSWERED, OK], "rejected": [NO], "tools": [TOOL]}
    found = read_row(row)
    assert isinstance(found, tuple)
    assert isinstance(found[1], PreferenceRow)
    assert isinstance(found[1].chosen, ChatRow)
    assert [message["role"] for message in found[1].chosen.messages] == ["user", "assistant", "tool", "assistant"]
    assert (found[1].chosen.tools, found[1].chosen.prompt_messages) == ((TOOL,), 1)


PROMPT: dict[str, Any] = {"prompt": [USER]}


@pytest.mark.parametrize(
    ("row", "path", "code"),
    [
        ({"prompt": "p", "rejected": "b"}, "chosen", "wrong_type"),
        ({"prompt": "p", "chosen": "a"}, "rejected", "wrong_type"),
        ({"prompt": "p", "chosen": "a", "rejected": None}, "rejected", "wrong_type"),
        ({"prompt": "p", "chosen": [OK], "rejected": "b"}, "chosen", "wrong_type"),
        ({"prompt": None, "chosen": "a", "rejected": "b"}, "prompt", "wrong_type"),
        ({"prompt": "p", "chosen": "a", "rejected": "b", "tools": [TOOL]}, "tools", "unsupported_field"),
        (PROMPT | {"chosen": "a"}, "rejected", "wrong_type"),
        (PROMPT | {"chosen": "a", "rejected": [NO]}, "rejected", "wrong_type"),
        (PROMPT | {"chosen": [OK], "rejected": "no"}, "rejected", "wrong_type"),
        (PROMPT | {"chosen": {"role": "assistant"}, "rejected": "no"}, "chosen", "wrong_type"),
        ({"chosen": "a", "rejected": "b"}, "prompt", "missing_prompt"),
        ({"chosen": [USER, OK]}, "rejected", "wrong_type"),
        ({"chosen": [OK], "rejected": [NO]}, "chosen[0]", "missing_prompt"),
        ({"prompt": "", "chosen": "a", "rejected": "b"}, "prompt", "empty_prompt"),
        ({"prompt": "p", "chosen": "a", "rejected": "a"}, "rejected", "identical_answers"),
        (PROMPT | {"chosen": "ok", "rejected": "ok"}, "rejected", "identical_answers"),
        (PROMPT | {"chosen": [OK], "rejected": [{**OK, "name": None}]}, "rejected", "identical_answers"),
        ({"chosen": [USER, OK], "rejected": [USER, OK]}, "rejected", "identical_answers"),
        ({"prompt": "p", "chosen": "", "rejected": "b"}, "chosen", "empty_answer"),
        ({"prompt": "p", "chosen": "a", "rejected": " \n"}, "rejected", "empty_answer"),
        (PROMPT | {"chosen": "ok", "rejected": ""}, "rejected", "empty_answer"),
        ({"chosen": [USER], "rejected": [USER, OK]}, "chosen", "empty_answer"),
        ({"chosen": [USER, OK, USER, OK], "rejected": [USER, OK]}, "rejected", "empty_answer"),
        (PROMPT | {"chosen": [], "rejected": [NO]}, "chosen", "role_order"),
        (PROMPT | {"chosen": [OK], "rejected": [USER, NO]}, "rejected[0]", "role_order"),
        (PROMPT | {"chosen": [OK, USER], "rejected": [NO]}, "chosen", "last_message_not_assistant"),
        (PROMPT | {"chosen": [OK], "rejected": [NO, SYSTEM, NO]}, "rejected[1].role", "role_order"),
        ({"chosen": [USER, OK, SYSTEM, OK], "rejected": [USER, NO]}, "chosen[2].role", "role_order"),
        ({"prompt": [SYSTEM], "chosen": [OK], "rejected": [NO]}, "prompt", "no_user_message"),
        ({"prompt": [USER, OK], "chosen": [OK], "rejected": [NO]}, "prompt[1]", "last_message_not_user"),
        ({"messages": [USER, OK], "chosen": "ok", "rejected": "no"}, "messages[1]", "last_message_not_user"),
        ({"chosen": [USER, OK, OK], "rejected": [USER, OK, NO]}, "chosen[1]", "last_message_not_user"),
        (PROMPT | {"chosen": [{**OK, "weight": 0}], "rejected": [NO]}, "chosen[0].weight", "invalid_weight"),
        (PROMPT | {"chosen": [ANSWERED, OK], "rejected": [NO]}, "chosen[0]", "role_order"),
        (PROMPT | {"chosen": [CALLING, {**ANSWERED, "tool_call_id": "c2"}, OK], "rejected": [NO]},
         "chosen[1].tool_call_id", "unmatched_tool_call_id"),
        (PROMPT | {"chosen": "\ud83d", "rejected": "no"}, "chosen", "invalid_unicode"),
        (PROMPT | {"messages": [USER], "chosen": "ok", "rejected": "no"}, "", "mixed_formats"),
        ({"text": "t", "chosen": "ok", "rejected": "no"}, "", "mixed_formats"),
        (PROMPT | {"completion": "c", "chosen": "ok", "rejected": "no"}, "", "mixed_formats"),
        (PROMPT | {"functions": [], "chosen": "ok", "rejected": "no"}, "functions", "unsupported_field"),
    ],
)  # fmt: skip
def test_what_is_no_pair(row: dict[str, Any], path: str, code: str) -> None:
    found = problem(row)
    assert (found.path, found.code) == (path, code)


def test_the_first_rows_format_is_the_files() -> None:
    pair, chat = {"prompt": "p", "chosen": "a", "rejected": "b"}, {"messages": [USER, OK]}
    for row, expected in ((pair, "chat"), (chat, "preference"), (pair, "prompts"), ({"prompt": "p"}, "preference")):
        found = problem(row, expected)
        assert found.code == "mixed_formats"
        assert f"of format {expected}" in found.message


@pytest.mark.parametrize("prompt", ["hi", [USER]])
def test_whole_conversations_next_to_their_prompt_are_told_to_leave_it_out(prompt: Any) -> None:
    """As many public sets have them."""
    found = problem({"prompt": prompt, "chosen": [USER, OK], "rejected": [USER, NO]})
    assert found.path.startswith("chosen")
    assert "leave prompt and messages out" in (found.hint or "")
    found = problem({"prompt": prompt, "messages": [USER, OK], "chosen": [USER, OK], "rejected": [USER, NO]})
    assert (found.code, "leave prompt and messages out" in (found.hint or "")) == ("mixed_formats", True)


@pytest.mark.parametrize(
    ("row", "hint"),
    [
        ({"input": {"messages": [USER]}, "preferred_output": [OK], "non_preferred_output": [NO]}, '"chosen": […]'),
        ({"question": "2 + 2?", "answer": "4"}, "Rename question to prompt"),
    ],
)
def test_the_keys_of_others_are_told_ours(row: dict[str, Any], hint: str) -> None:
    found = problem(row)
    assert found.code == "missing_messages"
    assert hint in (found.hint or "")
