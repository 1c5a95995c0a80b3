"""Tools, tool calls and their answers in chat rows."""

from __future__ import annotations

import json
from typing import Any

import pytest

from finery.data.rows import ChatRow, read_row
from finery.types.errors import Problem

USER, DONE = {"role": "user", "content": "hi"}, {"role": "assistant", "content": "done"}


def call(id_: str | None = "c1", arguments: Any = "{}", **more: Any) -> dict[str, Any]:
    made = {"type": "function", "function": {"name": "f", "arguments": arguments}, **more}
    return made if id_ is None else {"id": id_, **made}


def calling(*calls: Any) -> dict[str, Any]:
    return {"role": "assistant", "content": None, "tool_calls": list(calls)}


def answer(id_: str | None = "c1", **more: Any) -> dict[str, Any]:
    made = {"role": "tool", "content": "r", **more}
    return made if id_ is None else {**made, "tool_call_id": id_}


def row(*messages: Any, **more: Any) -> ChatRow:
    found = read_row({"messages": list(messages), **more})
    assert not isinstance(found, Problem), found
    assert isinstance(found[1], ChatRow)
    return found[1]


def place(*messages: Any, **more: Any) -> tuple[str, str]:
    found = read_row({"messages": list(messages), **more})
    assert isinstance(found, Problem), found
    assert found.message
    assert found.hint
    return found.path, found.code


def test_a_call_and_its_answer_are_kept_with_arguments_as_an_object() -> None:
    messages = row(USER, calling(call(arguments='{"city": "Oslo", "n": null}')), answer(name="f"), DONE).messages
    assert messages == (
        USER,
        {"role": "assistant", "content": "", "tool_calls": [call(arguments={"city": "Oslo", "n": None})]},
        {"role": "tool", "content": "r", "tool_call_id": "c1", "name": "f"},
        DONE,
    )


@pytest.mark.parametrize(
    "arguments",
    [
        {"at": "2026-01-02"},
        {"at": 1767312000},
        {"city": "Oslo"},
        {"zip": "0150", "n": 1},
        {"a": None, "b": [{"c": 1.5}]},
    ],
)
def test_a04_a05_arguments_keep_their_own_keys_and_types(arguments: dict[str, Any]) -> None:
    for given in (arguments, json.dumps(arguments)):
        kept = row(USER, calling(call(arguments=given))).messages[1]["tool_calls"][0]["function"]["arguments"]
        assert json.dumps(kept) == json.dumps(arguments), "a number is no text, a null stays, and no key comes in"


@pytest.mark.parametrize("arguments", ["", "x", "[]", "7", '"{}"', "null", "{} {}", '{"a": NaN}', [], 7, None, True])
def test_arguments_that_are_no_object_are_refused(arguments: Any) -> None:
    path = "messages[1].tool_calls[0].function.arguments"
    assert place(USER, calling(call(arguments=arguments))) == (path, "invalid_arguments")


@pytest.mark.parametrize(
    ("text", "code"),
    [
        (r'{"a": "\u0000"}', "nul_character"),
        (r'{"a": "\ud83d"}', "invalid_unicode"),
        ('{"a": 1, "a": 2}', "duplicate_key"),
    ],
)
def test_a28_flaws_inside_the_text_of_arguments_are_found(text: str, code: str) -> None:
    assert place(USER, calling(call(arguments=text)))[1] == code


@pytest.mark.parametrize(
    ("given", "path", "code"),
    [
        ("f", "", "wrong_type"),
        ({"name": "f", "arguments": {}}, ".type", "wrong_type"),
        (call() | {"type": "tool"}, ".type", "wrong_type"),
        ({"type": "function", "name": "f"}, ".function", "wrong_type"),
        ({"type": "function", "function": {"arguments": "{}"}}, ".function.name", "wrong_type"),
        ({"type": "function", "function": {"name": "f"}}, ".function.arguments", "invalid_arguments"),
        (call(index=0), "", "unknown_field"),
        (call(7), ".id", "wrong_type"),  # type: ignore[arg-type]
    ],
)
def test_calls_of_another_shape_are_refused(given: Any, path: str, code: str) -> None:
    assert place(USER, calling(given)) == (f"messages[1].tool_calls[0]{path}", code)


def test_calls_belong_to_the_assistant_and_ids_to_tools() -> None:
    assert place({**USER, "tool_calls": [call()]}, DONE) == ("messages[0]", "unknown_field")
    assert place({**USER, "tool_call_id": "c1"}, DONE) == ("messages[0]", "unknown_field")
    assert place(USER, {**DONE, "tool_calls": {}}) == ("messages[1].tool_calls", "wrong_type")


@pytest.mark.parametrize(
    "messages",
    [
        (USER, calling(call("c1"), call("c2")), answer("c2"), answer("c1"), DONE),
        (USER, calling(call("c1")), USER, DONE),
        (USER, calling(call("c1")), answer("c1"), USER, calling(call("c1")), answer("c1"), DONE),
        (USER, calling(call(None), call(None)), answer(None), answer(None), DONE),
        (USER, calling(call("c1"))),
    ],
)
def test_a07_answers_that_belong_to_calls(messages: tuple[Any, ...]) -> None:
    assert len(row(*messages).messages) == len(messages)


@pytest.mark.parametrize(
    ("messages", "path", "code"),
    [
        ((USER, answer("c1"), DONE), "messages[1].tool_call_id", "unmatched_tool_call_id"),
        ((USER, calling(call("c1")), answer("c2"), DONE), "messages[2].tool_call_id", "unmatched_tool_call_id"),
        ((USER, calling(call("c1")), answer(None), DONE), "messages[2].tool_call_id", "unmatched_tool_call_id"),
        (
            (USER, calling(call("c1")), answer("c1"), answer("c1"), DONE),
            "messages[3].tool_call_id",
            "unmatched_tool_call_id",
        ),
        ((USER, calling(call("c1")), USER, answer("c1"), DONE), "messages[3].tool_call_id", "unmatched_tool_call_id"),
        ((USER, calling(call(None)), answer("c1"), DONE), "messages[2].tool_call_id", "unmatched_tool_call_id"),
        ((USER, calling(call("c1"), call("c1"))), "messages[1].tool_calls[1].id", "duplicate_tool_call_id"),
        (
            (USER, calling(call("c1")), calling(call("c1"))),
            "messages[2].tool_calls[0].id",
            "duplicate_tool_call_id",
        ),
    ],
)
def test_a31_answers_without_a_call_of_their_own(messages: tuple[Any, ...], path: str, code: str) -> None:
    assert place(*messages) == (path, code)


def test_tools_are_kept_as_they_are() -> None:
    tool = {"type": "function", "function": {"name": "f", "parameters": {"properties": {"a": None}}, "strict": True}}
    assert row(USER, DONE, tools=[tool]).tools == (tool,)
    assert row(USER, DONE, tools=[]).tools is None
    assert row(USER, DONE, tools=None).tools is None


@pytest.mark.parametrize(
    ("tools", "path", "code"),
    [
        ("[]", "tools", "wrong_type"),
        ([{"name": "f", "parameters": {}}], "tools[0].type", "wrong_type"),
        ([{"type": "function", "function": {}}], "tools[0].function.name", "wrong_type"),
        (["f"], "tools[0]", "wrong_type"),
        (
            [{"type": "function", "function": {"name": "f", "parameters": {"a": ["\0"]}}}],
            "tools[0].function.parameters.a[0]",
            "nul_character",
        ),
        (
            [{"type": "function", "function": {"name": "f", "x": float("nan")}}],
            "tools[0].function.x",
            "invalid_json",
        ),
    ],
)
def test_tools_of_another_shape_are_refused(tools: Any, path: str, code: str) -> None:
    assert place(USER, DONE, tools=tools) == (path, code)
