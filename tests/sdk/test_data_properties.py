"""Whatever comes in, the check answers; and how the bytes were cut makes no difference."""

from __future__ import annotations

import json
from itertools import pairwise
from typing import Any

from hypothesis import given, settings
from hypothesis import strategies as st

from finery.data.check import MAX_PROBLEMS, Report, RowCheck
from finery.data.rows import Row, read_row
from finery.types.errors import Problem

_WORDS = st.sampled_from(["user", "assistant", "system", "tool", "text", "function", "f", "c1", "{}", '{"a": 1}'])
_SCALARS = st.one_of(
    st.none(), st.booleans(), st.integers(), st.floats(), st.text(max_size=5), _WORDS, st.just("a\0"), st.just("\ud83d")
)
_NAMES = [
    *("messages", "prompt", "completion", "text", "input_ids", "labels", "attention_mask", "tools", "functions"),
    *("role", "content", "weight", "tool_calls", "tool_call_id", "name", "id", "type", "function", "arguments"),
    *("reasoning", "thinking", "chosen", "rejected"),
]
_KEYS = st.sampled_from(_NAMES) | st.text(max_size=3)
_VALUES = st.recursive(
    _SCALARS, lambda inner: st.lists(inner, max_size=4) | st.dictionaries(_KEYS, inner, max_size=5), max_leaves=25
)


def _messages() -> st.SearchStrategy[Any]:
    """Nearly right ones, so that the search gets past the first look."""
    call = st.fixed_dictionaries(
        {},
        optional={
            "id": _WORDS | _SCALARS,
            "type": st.just("function") | _SCALARS,
            "function": st.fixed_dictionaries({}, optional={"name": _WORDS, "arguments": _VALUES}) | _SCALARS,
        },
    )
    part = st.fixed_dictionaries({"type": st.just("text") | _SCALARS}, optional={"text": _SCALARS})
    message = st.fixed_dictionaries(
        {"role": _WORDS | _SCALARS},
        optional={
            "content": st.lists(part | _VALUES, max_size=2) | _SCALARS,
            "weight": st.integers(0, 1) | _SCALARS,
            "tool_calls": st.lists(call, max_size=2) | _VALUES,
            "tool_call_id": _WORDS | _SCALARS,
            "reasoning": _SCALARS,
        },
    )
    return st.lists(message | _VALUES, max_size=4)


_ROWS = st.fixed_dictionaries(
    {},
    optional={
        "messages": _messages(),
        "prompt": _messages() | _SCALARS,
        "completion": _messages() | _SCALARS,
        "text": _SCALARS,
        "input_ids": st.lists(st.integers(-1, 5), max_size=3) | _VALUES,
        "labels": st.lists(st.sampled_from([-100, 1, 2]), max_size=3) | _VALUES,
        "tools": _VALUES,
        "answer": _VALUES,
    },
)
_PAIRS = st.fixed_dictionaries(
    {"chosen": _messages() | _SCALARS, "rejected": _messages() | _SCALARS},
    optional={"prompt": _messages() | _SCALARS, "messages": _messages(), "tools": _VALUES, "text": _SCALARS},
)


@settings(max_examples=400)
@given(_ROWS | _PAIRS | _VALUES)
def test_a32_every_value_is_a_row_or_has_a_problem(value: Any) -> None:
    found = read_row(value)
    if isinstance(found, Problem):
        assert found.code
        assert found.message
        assert found.hint
        found.model_dump_json().encode()  # it can be stored and sent, whatever it is about
        assert "\0" not in found.model_dump_json()
        assert len(found.message) <= 600
        return
    format_, row = found
    assert isinstance(row, Row)
    assert read_row(value, format_) == found, "a row is read the same whatever came before it"
    json.dumps(value, allow_nan=True)


def report(content: bytes, cuts: list[int]) -> Report:
    check = RowCheck(max_line_bytes=64)
    places = [0, *sorted(cut % (len(content) + 1) for cut in cuts), len(content)]
    for start, end in pairwise(places):
        check.feed(content[start:end])
    return check.finish()


_LINES = st.sampled_from(
    [
        b'{"text":"a"}',
        b'{"text":"\xc3\xa4"}',
        b'{"text":"\xff"}',
        b"\xef\xbb\xbf",
        b"\xff\xfe",
        b" \t",
        b"7",
        b"{",
        b"\0",
    ]
)
_PIECES = st.one_of(_LINES, st.binary(max_size=6), st.just(b"x" * 70), st.sampled_from([b"\n", b"\r\n", b"\r"]))
_CONTENT = st.lists(_PIECES, max_size=20).map(b"".join)


@settings(max_examples=400)
@given(_CONTENT, st.lists(st.integers(0, 2**16), max_size=8))
def test_a32_any_bytes_in_any_cuts_give_the_same_report(content: bytes, cuts: list[int]) -> None:
    whole = report(content, [])
    assert report(content, cuts) == whole
    assert report(content, list(range(len(content)))) == whole, "byte by byte"
    assert whole.status == ("invalid" if whole.problem_count else "valid")
    assert whole.rows or whole.problem_count
    assert len(whole.problems) == min(whole.problem_count, MAX_PROBLEMS)
    for problem in whole.problems:
        problem.model_dump_json().encode()
        if problem.offset is not None and problem.line is not None:
            before = content[: problem.offset]
            assert before.count(b"\n") == problem.line - 1, "the line and the byte name the same place"
            assert not before or before.endswith(b"\n")
