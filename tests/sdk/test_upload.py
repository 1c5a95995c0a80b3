from __future__ import annotations

import io
import os
import threading
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import httpx
import pytest
from starlette.datastructures import FormData
from starlette.requests import Request

from finery import Finery, FineryError

from .support import BOTH, KEY, Client, Handler, Seen, Time, error_json, file_json, mocked, serving, value

NAMES = [
    "tränings data 你好 😀.jsonl",
    "a\u0308.jsonl",  # not composed: kept as it is
    'quote".jsonl',
    "back\\slash.jsonl",
    "line\r\nX-Evil: 1.jsonl",
    "../../etc/passwd",
    "nul\0.jsonl",
    ".hidden",
    "   ",
    "n" * 300,
]


class Form:
    """Keeps uploads; parsed by Starlette's multipart parser, which is not ours."""

    def __init__(self, *statuses: int) -> None:
        self.statuses = list(statuses)
        self.requests: list[httpx.Request] = []

    def __call__(self, request: httpx.Request) -> httpx.Response:
        request.read()
        return self._answer(request)

    def _answer(self, request: httpx.Request) -> httpx.Response:
        self.requests.append(request)
        status = self.statuses.pop(0) if self.statuses else 201
        return httpx.Response(status, json=file_json() if status == 201 else error_json("x"))


class AsyncForm(Form):
    async def __call__(self, request: httpx.Request) -> httpx.Response:  # type: ignore[override]
        await request.aread()
        return self._answer(request)


def form_of(kind: Client, *statuses: int) -> Form:
    return Form(*statuses) if kind is Finery else AsyncForm(*statuses)


async def form_data(request: httpx.Request) -> FormData:
    headers = [(name.lower(), text) for name, text in request.headers.raw]

    async def receive() -> dict[str, Any]:
        return {"type": "http.request", "body": request.content, "more_body": False}

    return await Request({"type": "http", "method": "POST", "headers": headers}, receive).form()


async def texts(request: httpx.Request) -> dict[str, str]:
    """The form's text fields."""
    return {name: field for name, field in (await form_data(request)).items() if isinstance(field, str)}


async def parsed(request: httpx.Request) -> tuple[str, str, bytes]:
    """The name field, the file's own name, the content."""
    form = await form_data(request)
    name, file = form["name"], form["file"]
    assert isinstance(name, str)
    assert not isinstance(file, str)
    assert len(request.content) == int(request.headers["content-length"])
    assert "transfer-encoding" not in request.headers
    return name, str(file.filename), await file.read()


@pytest.mark.parametrize("kind", BOTH)
@pytest.mark.parametrize("name", NAMES, ids=ascii)
async def test_e17_any_name_arrives_as_it_was_sent(kind: Client, name: str) -> None:
    form = form_of(kind)
    await value(mocked(kind, form).files.upload(b"\x00\r\n--x", name=name))
    sent_name, filename, content = await parsed(form.requests[0])
    assert (sent_name, content) == (name, b"\x00\r\n--x")
    assert not set(filename) & set('\r\n"\0'), "a name never ends the header"


@pytest.mark.parametrize("kind", BOTH)
async def test_e17_the_name_of_a_file_on_disk_arrives_as_it_is(kind: Client, tmp_path: Path) -> None:
    form = form_of(kind)
    path = tmp_path / NAMES[0]
    path.write_bytes(b'{"a": 1}\n')
    for source in (path, str(path)):
        await value(mocked(kind, form).files.upload(source))
    with path.open("rb") as file:
        await value(mocked(kind, form).files.upload(file))
    assert [await parsed(request) for request in form.requests] == [(NAMES[0], NAMES[0], b'{"a": 1}\n')] * 3


@pytest.mark.parametrize("kind", BOTH)
async def test_a_project_goes_along_as_a_field(kind: Client) -> None:
    for project, fields in (("proj_2", {"name": "a.jsonl", "project": "proj_2"}), (None, {"name": "a.jsonl"})):
        form = form_of(kind)
        await value(mocked(kind, form).files.upload(b"{}", name="a.jsonl", project=project))
        assert await texts(form.requests[0]) == fields
        assert (await parsed(form.requests[0]))[2] == b"{}"


def test_e17_a_name_that_is_no_text_is_refused(tmp_path: Path) -> None:
    path = tmp_path / os.fsdecode(b"\xff.jsonl")
    path.write_bytes(b"{}")
    with pytest.raises(ValueError, match="pass name="):
        mocked(Finery, Form()).files.upload(path)


@pytest.mark.parametrize("kind", BOTH)
async def test_every_kind_of_source_is_read_again_on_a_retry(kind: Client, tmp_path: Path) -> None:
    path = tmp_path / "rows.jsonl"
    path.write_bytes(b"0123456789")
    moved = io.BytesIO(b"skip0123456789")
    moved.seek(4)
    reader, writer = os.pipe()
    with os.fdopen(writer, "wb") as end:
        end.write(b"0123456789")
    with os.fdopen(reader, "rb") as pipe:
        for source in (path, b"0123456789", moved, pipe):
            form = form_of(kind, 503, 500)
            await value(mocked(kind, form).files.upload(source))
            bodies = [await parsed(request) for request in form.requests]
            assert len(bodies) == 3
            assert {body[2] for body in bodies} == {b"0123456789"}
            assert len({request.content for request in form.requests}) == 1, "the same bytes, boundary included"
            assert len({request.headers["idempotency-key"] for request in form.requests}) == 1


@pytest.mark.parametrize("kind", BOTH)
async def test_progress_counts_the_files_own_bytes_and_starts_over_on_a_retry(kind: Client, tmp_path: Path) -> None:
    size = 3 * (1 << 20) + 5
    path = tmp_path / "big.jsonl"
    path.write_bytes(b"x" * size)
    told: list[tuple[int, int]] = []
    form = form_of(kind, 503)
    await value(mocked(kind, form).files.upload(path, on_progress=lambda *at: told.append(at)))
    assert {total for _, total in told} == {size}
    once = [0, 1 << 20, 2 << 20, 3 << 20, size, size]
    assert [done for done, _ in told] == once + once


@pytest.mark.parametrize("kind", BOTH)
async def test_a_file_that_changes_while_it_is_sent_is_an_error(kind: Client, tmp_path: Path) -> None:
    path = tmp_path / "rows.jsonl"
    path.write_bytes(b"x" * (3 << 20))
    for change in (b"x" * (2 << 20), b"x" * (4 << 20)):

        def rewrite(done: int, total: int, content: bytes = change) -> None:
            if done == 1 << 20:
                path.write_bytes(content)

        path.write_bytes(b"x" * (3 << 20))
        form = form_of(kind)
        with pytest.raises(FineryError, match="changed while it was sent"):
            await value(mocked(kind, form).files.upload(path, on_progress=rewrite))
        assert form.requests == []


@pytest.mark.parametrize("kind", BOTH)
async def test_what_is_no_file_is_refused(kind: Client, tmp_path: Path) -> None:
    client = mocked(kind, form_of(kind))
    with pytest.raises(FileNotFoundError):
        await value(client.files.upload(tmp_path / "none.jsonl"))
    with pytest.raises(TypeError, match="text mode"):
        await value(client.files.upload(io.StringIO("{}")))
    with pytest.raises(TypeError, match="found int"):
        await value(client.files.upload(7))


@pytest.mark.parametrize("kind", BOTH)
async def test_a_big_file_never_lies_in_memory_whole(kind: Client, tmp_path: Path) -> None:
    path = tmp_path / "big.jsonl"
    with path.open("wb") as file:
        file.truncate(64 << 20)
    largest = 0

    class Sink(httpx.BaseTransport, httpx.AsyncBaseTransport):
        def handle_request(self, request: httpx.Request) -> httpx.Response:
            assert isinstance(request.stream, httpx.SyncByteStream)
            self.weigh(request.stream)
            return httpx.Response(201, json=file_json())

        def weigh(self, stream: httpx.SyncByteStream) -> None:
            nonlocal largest
            largest = max(largest, *(len(chunk) for chunk in stream))

        async def handle_async_request(self, request: httpx.Request) -> httpx.Response:
            nonlocal largest
            assert isinstance(request.stream, AsyncIterator | httpx.AsyncByteStream)
            async for chunk in request.stream:
                largest = max(largest, len(chunk))
            return httpx.Response(201, json=file_json())

    client: Any = kind(KEY, "http://h", transport=Sink())
    await value(client.files.upload(path))
    assert largest == 1 << 20


def test_a_refusal_before_the_end_of_the_body_is_heard() -> None:
    """The server answers 413 and hangs up while the client still sends."""
    refused = threading.Event()

    def reply(handler: Handler, seen: Seen) -> None:
        raise AssertionError("not reached")

    def refuse(handler: Handler) -> None:
        handler.json(413, error_json("too_large", "At most 1 MB."), Connection="close")
        handler.close_connection = True
        refused.set()

    with serving(reply) as server, Finery(KEY, server.url, runtime=Time().runtime(), max_retries=0) as client:
        server.RequestHandlerClass = type("Refusing", (Handler,), {"do_POST": refuse})
        with pytest.raises(FineryError) as caught:
            client.files.upload(b"x" * (8 << 20))
    assert refused.is_set()
    assert type(caught.value).__name__ == "PayloadTooLargeError"
