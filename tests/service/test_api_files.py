from __future__ import annotations

import hashlib
import json
from collections.abc import AsyncIterator
from typing import Any
from urllib.parse import quote

import httpx
import pytest

from finery_testing.api import CHAT_ROW, Api, Door, jsonl

BOUNDARY = "XX"
HEADERS = {"content-type": f"multipart/form-data; boundary={BOUNDARY}"}


def form(*parts: tuple[str, bytes]) -> bytes:
    """A multipart body of (Content-Disposition parameters, content)."""
    body = b""
    for disposition, content in parts:
        body += f"--{BOUNDARY}\r\nContent-Disposition: form-data; {disposition}\r\n\r\n".encode() + content + b"\r\n"
    return body + f"--{BOUNDARY}--\r\n".encode()


async def send(door: Door, *parts: tuple[str, bytes]) -> httpx.Response:
    return await door.client.post("/v1/files", content=form(*parts), headers=HEADERS)


def kept(api: Api, door: Door) -> list[str]:
    return [key for key in api.objects() if door.tenant.id in key]


GOOD = jsonl(CHAT_ROW)
FILE = ('name="file"; filename="a.jsonl"', GOOD)


async def test_file_is_stored_by_content_checked_and_read_back(api: Api) -> None:
    door = await api.tenant()
    content = GOOD * 3
    answer = await door.upload(content, "train.jsonl")
    assert answer.status_code == 201, answer.text
    file = answer.json()
    digest = hashlib.sha256(content).hexdigest()
    assert (file["name"], file["bytes"], file["sha256"]) == ("train.jsonl", len(content), digest)
    assert (file["status"], file["format"], file["rows"], file["errors"]) == ("valid", "chat", 3, [])
    assert file["project"] == door.tenant.project_id
    assert (await door.get(f"/v1/files/{file['id']}")).json() == file
    assert (await door.get("/v1/files")).json()["data"] == [file]
    key = f"{door.tenant.id}/files/{digest}-{file['id']}"
    assert kept(api, door) == [key]
    assert (api.store_folder / key).read_bytes() == content


async def test_same_content_twice_is_two_files_and_one_object(api: Api) -> None:
    door = await api.tenant()
    ids = {(await door.upload(GOOD, name)).json()["id"] for name in ("a.jsonl", "b.jsonl")}
    assert len(ids) == 2
    assert len(kept(api, door)) == 1


async def test_a32_invalid_rows_make_an_invalid_file_not_a_refused_upload(api: Api) -> None:
    door = await api.tenant()
    answer = await door.upload(GOOD + b"7\n" * 150 + b'{"messages": NaN}\n')
    file = answer.json()
    assert (answer.status_code, file["status"], file["rows"]) == (201, "invalid", 1)
    assert (len(file["errors"]), file["error_count"]) == (100, 151)
    first = file["errors"][0]
    assert (first["line"], first["offset"], first["code"]) == (2, len(GOOD), "not_an_object")
    assert first["message"]
    assert first["hint"]


async def test_a28_problems_with_strange_text_can_be_stored_and_read(api: Api) -> None:
    door = await api.tenant()
    rows = rb'{"messages":[{"role":"a\u0000\ud83d\u2028","content":"x"}]}' + b"\n"
    rows += rb'{"messages":[{"role":"user\u2028\u0085"}]}' + b"\n"
    answer = await door.upload(rows)
    assert (answer.status_code, answer.json()["error_count"]) == (201, 2)
    assert (await door.get(f"/v1/files/{answer.json()['id']}")).status_code == 200


NAMES = [
    "tränings data 你好 😀.jsonl",
    "e\u0301.jsonl",
    "../../etc/passwd",
    ".hidden",
    "a\\b.jsonl",
    "a;b=c.jsonl",
    'q"t',
]


@pytest.mark.parametrize("name", NAMES)
async def test_e17_names_are_kept_as_sent_and_never_in_keys(api: Api, name: str) -> None:
    door = await api.tenant()
    by_filename = await door.upload(GOOD, name)
    by_field = await send(door, FILE, ('name="name"', name.encode()))
    extended = await send(door, (f"name=\"file\"; filename*=UTF-8''{quote(name, safe='')}", GOOD))
    assert [answer.json()["name"] for answer in (by_filename, by_field, extended)] == [name] * 3
    file = by_filename.json()
    assert kept(api, door) == [f"{door.tenant.id}/files/{file['sha256']}-{file['id']}"]


@pytest.mark.parametrize(
    ("name", "code"),
    [
        ("x" * 256, "invalid_file_name"),
        ("ä" * 128, "invalid_file_name"),
        ("a\r\nx-evil: 1", "invalid_file_name"),
        ("a\0b", "invalid_file_name"),
        ("a\x1bb", "invalid_file_name"),
        ("a\u2028b", "invalid_file_name"),
        ("   ", "invalid_file_name"),
    ],
)
async def test_e17_names_that_cannot_be_kept_are_refused(api: Api, name: str, code: str) -> None:
    door = await api.tenant()
    quoted = name.replace("\r", "%0D").replace("\n", "%0A")  # as browsers do
    by_filename = await send(door, (f'name="file"; filename="{quoted}"', GOOD))
    for answer in [by_filename, await send(door, FILE, ('name="name"', name.encode()))]:
        assert (answer.status_code, answer.json()["error"]["code"]) == (400, code)
    assert kept(api, door) == []
    assert (await door.get("/v1/files")).json()["data"] == []


async def test_e17_255_bytes_are_a_name(api: Api) -> None:
    door = await api.tenant()
    assert (await door.upload(GOOD, "x" * 255)).status_code == 201


METADATA = ('name="metadata"', b"x" * 2 * 2**20)


@pytest.mark.parametrize(
    ("parts", "status", "code", "param"),
    [
        ((METADATA, FILE), 413, "field_too_large", "metadata"),
        ((FILE, METADATA), 413, "field_too_large", "metadata"),
        ((('name="file"', GOOD),), 400, "missing_filename", "file"),
        ((('name="file"; filename=""', GOOD),), 400, "missing_filename", "file"),
        ((), 400, "missing_file", "file"),
        ((('name="name"', b"a"),), 400, "missing_file", "file"),
        ((FILE, FILE), 400, "duplicate_field", "file"),
        ((FILE, ('name="name"', b"a"), ('name="name"', b"b")), 400, "duplicate_field", "name"),
        ((FILE, ('name="colour"', b"red")), 400, "unknown_field", "colour"),
        ((FILE, ('name="name"', b"\xff")), 400, "invalid_utf8", "name"),
        (tuple((f'name="f{n}"', b"") for n in range(1001)), 400, "too_many_parts", None),
        ((FILE, ('name="project"', b"proj_unknown")), 400, "project_not_found", "project"),
        ((FILE, ('name="project"', b"\0")), 400, "project_not_found", "project"),
        ((("nothing", b""),), 400, "invalid_multipart", None),
    ],
)
async def test_e16_forms_that_are_refused_leave_nothing(
    api: Api, parts: tuple[tuple[str, bytes], ...], status: int, code: str, param: str | None
) -> None:
    door = await api.tenant()
    answer = await send(door, *parts)
    error = answer.json()["error"]
    assert (answer.status_code, error["code"], error["param"]) == (status, code, param), error
    if code == "field_too_large":
        assert "65536" in error["message"], "the limit is named"
    assert kept(api, door) == []
    assert (await door.get("/v1/files")).json()["data"] == []


@pytest.mark.parametrize("order", [1, -1])
async def test_e16_order_of_fields_and_types_of_parts_do_not_matter(api: Api, order: int) -> None:
    door = await api.tenant()
    file = ('name="file"; filename="a.txt"\r\nContent-Type: image/png', GOOD)
    answer = await send(door, *(file, ('name="purpose"', b"fine-tune"), ('name="name"', b"n.jsonl"))[::order])
    assert (answer.status_code, answer.json()["name"], answer.json()["status"]) == (201, "n.jsonl", "valid")


@pytest.mark.parametrize(
    ("content", "content_type"),
    [
        (form(FILE), "application/json"),
        (form(FILE), "multipart/form-data"),
        (form(FILE), f"multipart/form-data; boundary={'y' * 500}"),
        (form(FILE)[:-10], HEADERS["content-type"]),
        (b"garbage", HEADERS["content-type"]),
        (b"", HEADERS["content-type"]),
        (b"--XX\r\n" + b"h" * 100_000, HEADERS["content-type"]),
    ],
)
async def test_bodies_that_are_no_form_are_refused(api: Api, content: bytes, content_type: str) -> None:
    door = await api.tenant()
    answer = await door.client.post("/v1/files", content=content, headers={"content-type": content_type})
    assert (answer.status_code, answer.json()["error"]["code"]) == (400, "invalid_multipart")
    assert kept(api, door) == []


async def test_file_over_the_limit_is_413_naming_it_and_leaves_nothing(api: Api) -> None:
    door = await api.tenant()

    async def slowly() -> AsyncIterator[bytes]:
        yield form(FILE)[: -len("\r\n--XX--\r\n")]
        for _ in range(40):
            yield GOOD * 500

    declared = await door.upload(b"x" * 6 * 2**20)
    undeclared = await door.client.post("/v1/files", content=slowly(), headers=HEADERS)
    for answer in [await door.upload(GOOD * 20_000), declared, undeclared]:
        assert (answer.status_code, answer.json()["error"]["code"]) == (413, "file_too_large")
        assert str(2**20) in answer.json()["error"]["message"]
    assert kept(api, door) == []


async def test_file_of_exactly_the_limit_is_taken(api: Api) -> None:
    door = await api.tenant()
    row = json.dumps(CHAT_ROW).encode()
    content = row + b" " * (2**20 - len(row))
    assert (await door.upload(content)).json()["bytes"] == 2**20
    assert (await door.upload(content + b" ")).status_code == 413


async def test_client_that_goes_away_leaves_nothing(api: Api) -> None:
    door = await api.tenant()
    head = form(FILE)[:-12]
    messages: list[dict[str, Any]] = [
        {"type": "http.request", "body": head + GOOD * 10_000, "more_body": True},
        {"type": "http.disconnect"},
    ]
    sent: list[Any] = []

    async def receive_() -> dict[str, Any]:
        return messages.pop(0) if messages else {"type": "http.disconnect"}

    async def send_(message: Any) -> None:
        sent.append(message)

    given = {**HEADERS, "authorization": door.client.headers["authorization"]}
    headers = [(name.encode(), value.encode()) for name, value in given.items()]
    scope = {
        "type": "http",
        "asgi": {"version": "3.0"},
        "http_version": "1.1",
        "method": "POST",
        "path": "/v1/files",
        "raw_path": b"/v1/files",
        "query_string": b"",
        "headers": headers,
        "root_path": "",
        "scheme": "http",
    }
    await api.app(scope, receive_, send_)
    assert not messages, "all of it was read"
    assert sent == []
    assert kept(api, door) == []
    assert (await door.get("/v1/files")).json()["data"] == []


async def test_broken_store_is_a_500_and_nothing_is_listed(api: Api, monkeypatch: pytest.MonkeyPatch) -> None:
    door = await api.tenant()

    async def broken(*_: Any, **__: Any) -> None:
        raise OSError("disk full")

    with monkeypatch.context() as patch:
        patch.setattr("finery_service.files.intake.obstore.rename_async", broken)
        assert (await door.upload(GOOD)).status_code == 500
    assert kept(api, door) == []
    assert (await door.get("/v1/files")).json()["data"] == []
