"""What a customer is told about the rows of an upload, line by line."""

from __future__ import annotations

import json
from typing import Any

import pytest

from finery.data.lines import MAX_LINE_BYTES
from finery_testing.api import CHAT_ROW, Api, Door, jsonl

GOOD = jsonl(CHAT_ROW)
USER, OK = {"role": "user", "content": "hi"}, {"role": "assistant", "content": "ok"}
MARK = b"\xef\xbb\xbf"


async def told(door: Door, content: bytes) -> dict[str, Any]:
    """The file, as the upload and a later look both have it."""
    answer = await door.upload(content)
    assert answer.status_code == 201, answer.text
    file: dict[str, Any] = answer.json()
    assert (await door.get(f"/v1/files/{file['id']}")).json() == file
    for error in file["errors"]:
        assert error["message"], "what was expected and found"
        assert error["hint"], "what to do"
        if error["line"] is not None:
            assert content[: error["offset"]].count(b"\n") == error["line"] - 1
    return file


async def refused(door: Door, file: dict[str, Any]) -> None:
    """No job comes of it; the first errors are in the answer."""
    answer = await door.job(training_file=file["id"])
    error = answer.json()["error"]
    assert (answer.status_code, error["code"], error["param"]) == (400, "invalid_file", "training_file")
    assert error["details"] == file["errors"][:20]


def lines(file: dict[str, Any]) -> list[tuple[int, str, str]]:
    return [(error["line"], error["path"], error["code"]) for error in file["errors"]]


def chat(*messages: Any) -> bytes:
    return jsonl({"messages": list(messages)})


async def test_a01_a_byte_order_mark_at_the_start_makes_no_difference(api: Api) -> None:
    door = await api.tenant()
    with_mark, without = await told(door, MARK + GOOD * 3), await told(door, GOOD * 3)
    own = {"id", "bytes", "sha256"}
    assert {key: with_mark[key] for key in with_mark if key not in own} == {
        key: without[key] for key in without if key not in own
    }
    assert (with_mark["status"], with_mark["rows"], with_mark["errors"]) == ("valid", 3, [])


async def test_a01_a_byte_order_mark_on_line_2_is_named(api: Api) -> None:
    door = await api.tenant()
    file = await told(door, GOOD + MARK + GOOD * 2)
    assert lines(file) == [(2, "", "byte_order_mark")]
    assert "byte order mark" in file["errors"][0]["message"]
    assert file["rows"] == 2
    await refused(door, file)


async def test_a08_weights(api: Api) -> None:
    door = await api.tenant()
    row = chat(USER, {**OK, "weight": 0}, USER, {**OK, "weight": 1})
    assert (await told(door, row))["status"] == "valid"
    wrong = b"".join(chat(USER, {**OK, "weight": weight}) for weight in (0.5, "1", True, -1))
    file = await told(door, row + wrong + chat({**USER, "weight": 1}, OK))
    assert lines(file) == [
        *((line, "messages[1].weight", "invalid_weight") for line in (2, 3, 4, 5)),
        (6, "messages[0].weight", "invalid_weight"),
    ]
    assert all("0 or 1" in error["message"] for error in file["errors"][:4])
    assert "assistant" in file["errors"][4]["message"]
    await refused(door, file)


async def test_a28_nul_and_half_characters(api: Api) -> None:
    def line(content: str) -> bytes:
        return b'{"messages":[{"role":"user","content":"hi"},{"role":"assistant","content":"%s"}]}\n' % content.encode()

    door = await api.tenant()
    pair = line(r"a\ud83d\ude00b")
    file = await told(door, line(r"a\u0000b") + line(r"a\ud83d b") + pair)
    assert lines(file) == [
        (1, "messages[1].content", "nul_character"),
        (2, "messages[1].content", "invalid_unicode"),
    ]
    assert file["rows"] == 1
    await refused(door, file)
    kept = await told(door, pair)
    (key,) = [key for key in api.objects() if kept["id"] in key]
    stored = (api.store_folder / key).read_bytes()
    assert stored == pair, "the row that is stored is the row that was sent"
    assert json.loads(stored)["messages"][1]["content"] == "a\U0001f600b"


@pytest.mark.parametrize("score", ["NaN", "Infinity", "-Infinity", "1e999"])
async def test_a29_numbers_that_json_does_not_have(api: Api, score: str) -> None:
    door = await api.tenant()
    row = json.dumps(CHAT_ROW)[:-1].encode() + b', "score": ' + score.encode() + b"}\n"
    file = await told(door, GOOD + row)
    assert lines(file) == [(2, "score", "invalid_json")]
    await refused(door, file)


async def test_a30_texts_and_lists_of_parts(api: Api) -> None:
    door = await api.tenant()
    texts = [{"type": "text", "text": "h"}, {"type": "text", "text": "i"}]
    contents: list[Any] = ["hi", texts, [{"type": "image", "image": "x"}], [{"type": "sound"}], [], ""]
    file = await told(door, b"".join(chat({"role": "user", "content": content}, OK) for content in contents))
    assert lines(file) == [(line, "messages[0].content[0]", "unsupported_content_part") for line in (3, 4)]
    for error, kind in zip(file["errors"], ("image", "sound"), strict=True):
        for word in ("message 0", "part 0", f"'{kind}'"):
            assert word in error["message"]
    assert file["rows"] == 4


async def test_a31_roles_and_their_order(api: Api) -> None:
    door = await api.tenant()
    system, human = {"role": "system", "content": "s"}, {"role": "human", "content": "hi"}
    tool = {"role": "tool", "tool_call_id": "c9", "content": "r"}
    rows = [
        chat(USER, OK, USER, USER),
        chat(system, system, USER, OK),
        chat(USER, system, OK),
        chat(system, USER, OK),  # whether the model's template takes it, the job's preparation says
        chat(OK),
        chat(human, OK),
        chat(USER, tool, OK),
    ]
    file = await told(door, b"".join(rows))
    assert lines(file) == [
        (1, "messages", "last_message_not_assistant"),
        (2, "messages[1].role", "role_order"),
        (3, "messages[1].role", "role_order"),
        (5, "messages", "no_user_message"),
        (6, "messages[0].role", "unknown_role"),
        (7, "messages[1].tool_call_id", "unmatched_tool_call_id"),
    ]
    assert file["rows"] == 1
    assert "'human'" in file["errors"][4]["message"]
    assert "'c9'" in file["errors"][5]["message"]
    await refused(door, file)


A32 = [
    (b"[]", "", "not_an_object"),
    (b'"x"', "", "not_an_object"),
    (b"7", "", "not_an_object"),
    (b"null", "", "not_an_object"),
    (b"{}", "messages", "missing_messages"),
    (b'{"messages":"hi"}', "messages", "wrong_type"),
    (b'{"messages":[],"messages":[{"role":"user","content":"a"},{"role":"assistant","content":"b"}]}', "messages", "duplicate_key"),  # noqa: E501
    (b'{"prompt":"a","completion":"b"}', "", "mixed_formats"),
    (b'{"chosen":"a","rejected":"b"}', "", "mixed_formats"),
    (b'{"messages":[{"role":"user","content":"\xff"}]}', "", "invalid_utf8"),
]  # fmt: skip


async def test_a32_lines_that_are_no_rows(api: Api) -> None:
    door = await api.tenant()
    cut = GOOD[:30]
    content = GOOD + b"\n".join(line for line, _, _ in A32) + b"\n" + GOOD + cut
    file = await told(door, content)
    expected = [(n, path, code) for n, (_, path, code) in enumerate(A32, 2)]
    last = len(A32) + 3
    assert lines(file) == [*expected, (last, "", "invalid_json")]
    assert [content[error["offset"] :].split(b"\n")[0] for error in file["errors"]] == [*(row[0] for row in A32), cut]
    assert (file["rows"], file["error_count"], file["status"]) == (2, len(A32) + 1, "invalid")
    await refused(door, file)


async def test_a32_a_line_of_20_mib_is_named_with_the_limit(own_api: Api) -> None:
    door = await own_api.tenant()
    services = own_api.app.state.services
    object.__setattr__(services, "settings", services.settings.model_copy(update={"max_file_bytes": 2**25}))
    file = await told(door, GOOD + b'{"text":"' + b"x" * 20 * 2**20 + b'"}\n' + GOOD)
    assert lines(file) == [(2, "", "line_too_long")]
    assert str(MAX_LINE_BYTES) in file["errors"][0]["message"]
    assert file["rows"] == 2


@pytest.mark.parametrize("encoding", ["utf-16", "utf-16-be"])
async def test_a32_a_utf16_file_is_one_error(api: Api, encoding: str) -> None:
    door = await api.tenant()
    mark = b"\xfe\xff" if encoding == "utf-16-be" else b""
    file = await told(door, mark + (GOOD * 3).decode().encode(encoding))
    assert lines(file) == [(1, "", "invalid_utf8")]
    assert "UTF-16" in file["errors"][0]["message"]
    await refused(door, file)


@pytest.mark.parametrize(
    ("row", "format_"),
    [
        (CHAT_ROW, "chat"),
        ({"prompt": [USER], "completion": [OK]}, "completion"),
        ({"prompt": "1+1=", "completion": "2"}, "completion"),
        ({"text": "t"}, "text"),
        ({"input_ids": [1, 2], "labels": [-100, 2]}, "tokens"),
        ({"messages": [USER], "chosen": "ok", "rejected": "no"}, "preference"),
        ({"prompt": "1+1=", "chosen": "2", "rejected": "3"}, "preference"),
        ({"messages": [USER], "answer": "2"}, "prompts"),
        ({"prompt": "1+1="}, "prompts"),
    ],
)
async def test_every_format_is_taken_and_said(api: Api, row: dict[str, Any], format_: str) -> None:
    file = await told(await api.tenant(), jsonl(row, row))
    assert (file["status"], file["format"], file["encoding"], file["rows"]) == ("valid", format_, "jsonl", 2)


async def test_pairs_that_cannot_be_learned_from_are_named_by_line(api: Api) -> None:
    pair: dict[str, Any] = {"messages": [USER], "chosen": "ok", "rejected": "no"}
    rows = [pair, pair | {"rejected": None}, pair | {"rejected": "ok"}, pair | {"messages": [USER, OK]}, CHAT_ROW]
    file = await told(await api.tenant(), jsonl(*rows))
    assert (file["format"], file["rows"]) == ("preference", 1)
    assert lines(file) == [
        (2, "rejected", "wrong_type"),
        (3, "rejected", "identical_answers"),
        (4, "messages[1]", "last_message_not_user"),
        (5, "", "mixed_formats"),
    ]
