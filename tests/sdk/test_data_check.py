"""The row check of data files, fed bytes. Pure: no database."""

from __future__ import annotations

import json
import tracemalloc
from typing import Any

import pytest

from finery.data.check import MAX_PROBLEMS, Report, RowCheck
from finery.data.lines import MAX_LINE_BYTES
from finery_testing.api import CHAT_ROW, jsonl

GOOD = jsonl(CHAT_ROW)
MESSAGES = b'[{"role":"user","content":"a"},{"role":"assistant","content":"b"}]'
PAIR = (("user", "a"), ("assistant", "b"))


def check(content: bytes, piece: int = 1 << 20, **limits: Any) -> Report:
    checker = RowCheck(**limits)
    for start in range(0, len(content), piece):
        checker.feed(content[start : start + piece])
    return checker.finish()


def chat(*messages: tuple[str, str]) -> dict[str, Any]:
    return {"messages": [{"role": role, "content": content} for role, content in messages]}


def only(content: bytes) -> tuple[int | None, str, str]:
    report = check(content)
    assert report.status == "invalid"
    assert report.problem_count == 1, report.problems
    problem = report.problems[0]
    assert problem.message, "a problem says what was expected and found"
    assert problem.hint, "a problem says what to do"
    return problem.line, problem.path, problem.code


def test_a01_byte_order_mark_at_the_start_is_skipped() -> None:
    with_mark = check(b"\xef\xbb\xbf" + GOOD * 3)
    assert with_mark == check(GOOD * 3)
    assert (with_mark.status, with_mark.format, with_mark.rows) == ("valid", "chat", 3)


def test_a01_byte_order_mark_on_a_later_line_is_named() -> None:
    report = check(GOOD + b"\xef\xbb\xbf" + GOOD)
    assert [(p.line, p.code) for p in report.problems] == [(2, "byte_order_mark")]
    assert "byte order mark" in report.problems[0].message


@pytest.mark.parametrize(
    ("row", "path"),
    [
        ({"role": "assistant", "content": "ok", "weight": 0.5}, "messages[1].weight"),
        ({"role": "assistant", "content": "ok", "weight": "1"}, "messages[1].weight"),
        ({"role": "assistant", "content": "ok", "weight": True}, "messages[1].weight"),
        ({"role": "assistant", "content": "ok", "weight": -1}, "messages[1].weight"),
        ({"role": "assistant", "content": "ok", "weight": None}, "messages[1].weight"),
    ],
)
def test_a08_weights_other_than_0_and_1_are_refused(row: dict[str, Any], path: str) -> None:
    report = check(GOOD + jsonl({"messages": [{"role": "user", "content": "hi"}, row]}))
    assert [(p.line, p.path, p.code) for p in report.problems] == [(2, path, "invalid_weight")]
    assert "0 or 1" in report.problems[0].message


def test_a08_weights_0_and_1_on_assistant_messages_only() -> None:
    user, hi = {"role": "user", "content": "hi"}, {"role": "assistant", "content": "ok"}
    row = {"messages": [user, {**hi, "weight": 0}, user, {**hi, "weight": 1}]}
    assert check(jsonl(row)).rows == 1
    assert only(jsonl({"messages": [{**user, "weight": 1}, hi]})) == (1, "messages[0].weight", "invalid_weight")


def test_a28_nul_and_half_characters_are_refused_and_whole_ones_kept() -> None:
    def line(content: str) -> bytes:
        return b'{"messages":[{"role":"user","content":"hi"},{"role":"assistant","content":"%s"}]}\n' % content.encode()

    report = check(line(r"a\u0000b") + line(r"a\ud83d b") + line(r"a\ud83d\ude00b"))
    found = [(p.line, p.path, p.code) for p in report.problems]
    assert found == [
        (1, "messages[1].content", "nul_character"),
        (2, "messages[1].content", "invalid_unicode"),
    ]
    assert report.rows == 1
    for problem in report.problems:
        problem.model_dump_json().encode()  # neither NUL nor half a character went into the report
        assert "\0" not in problem.message


@pytest.mark.parametrize("score", ["NaN", "Infinity", "-Infinity", "1e999"])
def test_a29_numbers_that_json_does_not_have_are_refused_with_their_line(score: str) -> None:
    row = json.dumps(CHAT_ROW)[:-1].encode() + b', "score": ' + score.encode() + b"}\n"
    assert only(GOOD + row) == (2, "score", "invalid_json")


@pytest.mark.parametrize(
    ("row", "path", "code"),
    [
        (
            chat(("user", "a"), ("assistant", "b"), ("user", "c"), ("user", "d")),
            "messages",
            "last_message_not_assistant",
        ),
        (chat(("system", "a"), ("system", "b"), ("user", "c"), ("assistant", "d")), "messages[1].role", "role_order"),
        (chat(("user", "a"), ("system", "b"), ("assistant", "c")), "messages[1].role", "role_order"),
        (chat(("assistant", "a")), "messages", "no_user_message"),
        (chat(("human", "a"), ("assistant", "b")), "messages[0].role", "unknown_role"),
        (
            chat(("user", "a"), ("tool", "b"), ("assistant", "c")),
            "messages[1].tool_call_id",
            "unmatched_tool_call_id",
        ),
        (chat(("user", "a"), ("developer", "b"), ("assistant", "c")), "messages[1].role", "role_order"),
        ({"messages": []}, "messages", "last_message_not_assistant"),
    ],
)
def test_a31_roles_and_their_order(row: dict[str, Any], path: str, code: str) -> None:
    assert only(GOOD + jsonl(row)) == (2, path, code)


def test_a31_system_message_in_the_first_place_is_fine() -> None:
    assert check(jsonl(chat(("system", "s"), ("user", "a"), ("assistant", "b")))).status == "valid"


@pytest.mark.parametrize(
    ("line", "code"),
    [
        (b"[]", "not_an_object"),
        (b'"x"', "not_an_object"),
        (b"7", "not_an_object"),
        (b"null", "not_an_object"),
        (b"{}", "missing_messages"),
        (b'{"messages":"hi"}', "wrong_type"),
        (b'{"messages":["hi"]}', "wrong_type"),
        (b'{"messages":[{"content":"a"}]}', "wrong_type"),
        (b'{"messages":[{"role":"user","content":null}]}', "wrong_type"),
        (
            b'{"messages":[],"messages":[{"role":"user","content":"a"},{"role":"assistant","content":"b"}]}',
            "duplicate_key",
        ),
        (b'{"messages":[{"role":"user","content":"a","role":"assistant"}]}', "duplicate_key"),
        (b'{"prompt":"a","completion":"b"}', "mixed_formats"),
        (b'{"chosen":"a","rejected":"b"}', "mixed_formats"),
        (b'{"messages":[{"role":"user","content":"a"}', "invalid_json"),
        (b'{"messages":[{"role":"user","content":"\xff"}]}', "invalid_utf8"),
        (b"[" * 100_000, "invalid_json"),
        (b'{"n":' + b"9" * 5000 + b"}", "invalid_json"),
        (
            b'{"messages":[{"role":"user","content":"a","name":"bob"},{"role":"assistant","content":"b"}]}',
            "unknown_field",
        ),
        (
            b'{"functions":[],"messages":[{"role":"user","content":"a"},{"role":"assistant","content":"b"}]}',
            "unsupported_field",
        ),
    ],
)
def test_a32_lines_that_are_no_rows_are_named_with_line_and_byte(line: bytes, code: str) -> None:
    report = check(GOOD + line + b"\n" + GOOD)
    assert [(p.line, p.code, p.offset) for p in report.problems] == [(2, code, len(GOOD))]
    assert (report.rows, report.status) == (2, "invalid")


def test_a32_line_cut_in_the_middle_without_an_end() -> None:
    assert only(GOOD + GOOD[:20]) == (2, "", "invalid_json")
    assert check(GOOD + GOOD.rstrip(b"\n")).rows == 2


@pytest.mark.parametrize("encoding", ["utf-16", "utf-16-be"])
def test_a32_utf16_file_is_one_problem(encoding: str) -> None:
    content = (GOOD * 3).decode().encode(encoding)
    if encoding == "utf-16-be":
        content = b"\xfe\xff" + content
    line, _, code = only(content)
    assert (line, code) == (1, "invalid_utf8")


def test_a32_rows_of_no_format_are_told_which_there_are() -> None:
    (problem,) = check(b'{"question":"a","answer":"b"}\n').problems
    assert (problem.line, problem.path, problem.code) == (1, "messages", "missing_messages")
    for key in ("messages", "prompt", "completion", "text", "input_ids"):
        assert key in problem.message


def test_a32_the_first_good_row_fixes_the_format_of_the_file() -> None:
    report = check(b'{}\n{"prompt":"a","completion":"b"}\n{"text":"t"}\n' + GOOD + b'{"prompt":"","completion":""}\n')
    assert (report.format, report.rows) == ("completion", 2)
    found = [(p.line, p.code) for p in report.problems]
    assert found == [(1, "missing_messages"), (3, "mixed_formats"), (4, "mixed_formats")]


def test_a32_line_too_long_costs_no_memory_and_the_next_line_counts() -> None:
    checker = RowCheck()
    checker.feed(GOOD + b'{"messages":"')
    tracemalloc.start()
    for _ in range(20):
        checker.feed(b"x" * 2**20)
    peak = tracemalloc.get_traced_memory()[1]
    tracemalloc.stop()
    checker.feed(b'"}\n' + GOOD)
    report = checker.finish()
    assert [(p.line, p.code) for p in report.problems] == [(2, "line_too_long")]
    assert str(MAX_LINE_BYTES) in report.problems[0].message
    assert report.rows == 2
    assert peak < 2 * MAX_LINE_BYTES + 2**22


def test_first_hundred_problems_are_kept_and_all_are_counted() -> None:
    report = check(b"7\n" * 250)
    assert len(report.problems) == MAX_PROBLEMS
    assert report.problem_count == 250
    assert report.problems[-1].line == 100
    assert report.format is None


@pytest.mark.parametrize("piece", [1, 2, 3, 7, 64])
def test_pieces_of_any_size_give_the_same_report(piece: int) -> None:
    content = (
        b"\xef\xbb\xbf"
        + GOOD
        + b"\r\n  \n7\n"
        + "ä😀".encode()
        + b"\n"
        + jsonl(chat(("user", "ä😀"), ("assistant", "ö")))
        + b"x"
    )
    report = check(content)
    assert check(content, piece) == report
    assert [(p.line, p.code) for p in report.problems] == [
        (4, "not_an_object"),
        (5, "invalid_json"),
        (7, "invalid_json"),
    ]
    assert [content[p.offset or 0 :][:1] for p in report.problems] == [b"7", "ä".encode()[:1], b"x"]


@pytest.mark.parametrize("content", [b"", b"\n\n", b"\xef\xbb\xbf"])
def test_file_without_rows_is_invalid(content: bytes) -> None:
    assert only(content) == (None, "", "empty_file")
