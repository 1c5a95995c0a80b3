"""Downloads in parallel: several files at once, and big files in several spans at once."""

from __future__ import annotations

import gc
import hashlib
import random
import threading
import time as clock
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any
from urllib.parse import unquote

import pytest

from finery import APIError, DownloadError, NotFoundError, _download
from finery._fetch import PARALLEL

from .store import on_disk, send_range, wanted
from .support import Client, Handler, HttpServer, Seen, checkpoint_json, client_of, error_json, serving, value

SPAN = 100_000
CONTENT = random.Random(0).randbytes(4 * SPAN + 12_345)  # 5 spans
SIZE = len(CONTENT)
NAME = "model.safetensors"
PARTIAL = f".{NAME}.{hashlib.sha256(CONTENT).hexdigest()[:12]}.part"
Send = Callable[[Handler, bytes, int, int], None]


@pytest.fixture(autouse=True)
def short_spans(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(_download, "SPAN_BYTES", SPAN)


@contextmanager
def stored(files: dict[str, bytes], send: Send = send_range) -> Iterator[HttpServer]:
    def reply(handler: Handler, seen: Seen) -> None:
        if "/files/" not in seen.path:
            return handler.json(200, checkpoint_json(files))
        content = files[unquote(seen.path.partition("/files/")[2])]
        if not content:
            return handler.whole(200, b"")
        return send(handler, content, *wanted(seen, len(content)))

    with serving(reply) as server:
        yield server


async def download(kind: Client, server: HttpServer, folder: Path, **options: Any) -> None:
    await value(client_of(kind, server).checkpoints.download("ckpt_1", folder, **options))


def ranges(server: HttpServer, size: int = SIZE) -> list[tuple[int, int]]:
    """Of the big file."""
    return sorted(wanted(seen, size) for seen in server.seen if seen.path.endswith(NAME))


def partial(*done: int, content: bytes = CONTENT) -> bytes:
    """What a killed run leaves: the first `done` bytes of every span, and how many they are."""
    body = bytearray(len(content))
    for n, count in enumerate(done):
        body[n * SPAN : n * SPAN + count] = content[n * SPAN : n * SPAN + count]
    return bytes(body) + b"".join(count.to_bytes(8, "little") for count in done)


class Together:
    """Sends; knows how many answers were on their way at once, and lets none end before `least` were."""

    def __init__(self, least: int) -> None:
        self.most = 0
        self._now = 0
        self._changed = threading.Condition()
        self._least = least

    def __call__(self, handler: Handler, content: bytes, start: int, end: int) -> None:
        with self._changed:
            self._now += 1
            self.most = max(self.most, self._now)
            self._changed.notify_all()
            assert self._changed.wait_for(lambda: self.most >= self._least, 30)
        clock.sleep(0.02)  # long enough for a fifth, were there one
        with self._changed:
            self._now -= 1
        send_range(handler, content, start, end)


async def test_a_big_file_comes_in_four_spans_at_once_every_byte_once(kind: Client, tmp_path: Path) -> None:
    together = Together(least=PARALLEL)
    told: list[tuple[int, int]] = []
    with stored({NAME: CONTENT}, together) as server:
        await download(kind, server, tmp_path, on_progress=lambda *at: told.append(at))
        assert ranges(server) == [(n * SPAN, min((n + 1) * SPAN, SIZE)) for n in range(5)]
    assert together.most == PARALLEL == 4
    assert on_disk(tmp_path) == {NAME: CONTENT}
    assert [done for done, _ in told] == sorted(done for done, _ in told)
    assert told[-1] == (SIZE, SIZE)


async def test_many_files_come_four_at_once(kind: Client, tmp_path: Path) -> None:
    files = {f"sub{n % 3}/{n}.bin": bytes([n]) * (n * 100 + 1) for n in range(30)}
    together = Together(least=PARALLEL)
    with stored(files, together) as server:
        await download(kind, server, tmp_path)
        assert len([seen for seen in server.seen if "/files/" in seen.path]) == 30
    assert together.most == PARALLEL
    assert on_disk(tmp_path) == files


async def test_d14_what_every_span_has_is_not_asked_for_again(kind: Client, tmp_path: Path) -> None:
    (tmp_path / PARTIAL).write_bytes(partial(SPAN, 40_000, 0, SPAN - 1, 12_345))
    with stored({NAME: CONTENT}) as server:
        await download(kind, server, tmp_path)
        assert ranges(server) == [(140_000, 200_000), (200_000, 300_000), (399_999, 400_000)]
    assert on_disk(tmp_path) == {NAME: CONTENT}


@pytest.mark.parametrize("left", [1, SPAN, SIZE - 1])
async def test_d14_the_beginning_that_a_run_in_one_piece_left_is_kept(kind: Client, tmp_path: Path, left: int) -> None:
    (tmp_path / PARTIAL).write_bytes(CONTENT[:left])
    with stored({NAME: CONTENT}) as server:
        await download(kind, server, tmp_path)
        assert sum(end - start for start, end in ranges(server)) == SIZE - left
    assert on_disk(tmp_path) == {NAME: CONTENT}


async def test_d14_a_whole_partial_is_proved_and_named_without_a_fetch(kind: Client, tmp_path: Path) -> None:
    for left in (CONTENT, partial(*[SPAN] * 4, 12_345)):
        (tmp_path / PARTIAL).write_bytes(left)
        with stored({NAME: CONTENT}) as server:
            await download(kind, server, tmp_path)
            assert ranges(server) == []
        assert on_disk(tmp_path) == {NAME: CONTENT}
        (tmp_path / NAME).unlink()


@pytest.mark.parametrize(
    "rubbish",
    [
        partial(SPAN, 40_000, 0, SPAN, 12_345, content=bytes(SIZE)),  # counts of bytes that are not the file's
        partial(SPAN, 40_000, 0, SPAN, 12_345)[:-40] + b"\xff" * 40,  # counts of more than there can be
        bytes(SIZE + 7),
        bytes(SIZE),
    ],
    ids=["bytes", "counts", "size", "whole"],
)
async def test_d14_a_spoilt_partial_is_thrown_away(kind: Client, tmp_path: Path, rubbish: bytes) -> None:
    (tmp_path / PARTIAL).write_bytes(rubbish)
    with stored({NAME: CONTENT}) as server:
        await download(kind, server, tmp_path)
        assert ranges(server)[-1][1] == SIZE
    assert on_disk(tmp_path) == {NAME: CONTENT}


async def test_a_server_without_ranges_sends_the_file_in_one_piece(kind: Client, tmp_path: Path) -> None:
    told: list[int] = []
    with stored({NAME: CONTENT}, lambda handler, content, *_: handler.whole(200, content)) as server:
        await download(kind, server, tmp_path, on_progress=lambda done, _: told.append(done))
        assert "range" not in server.seen[-1].headers
    assert on_disk(tmp_path) == {NAME: CONTENT}
    assert told[-1] == SIZE


async def test_a_cut_span_goes_on_from_the_bytes_that_came(kind: Client, tmp_path: Path) -> None:
    def send(handler: Handler, content: bytes, start: int, end: int) -> None:
        if start % SPAN or end == SIZE:
            return send_range(handler, content, start, end)
        where = {"Content-Length": str(end - start), "Content-Range": f"bytes {start}-{end - 1}/{SIZE}"}
        handler.head(206, **where)
        handler.wfile.write(content[start : start + 60_000])
        return handler.cut()

    with stored({NAME: CONTENT}, send) as server:
        await download(kind, server, tmp_path)
        cut = [(n * SPAN, n * SPAN + SPAN) for n in range(4)]
        again = [(n * SPAN + 60_000, n * SPAN + SPAN) for n in range(4)]
        assert ranges(server) == sorted([*cut, *again, (4 * SPAN, SIZE)])
    assert on_disk(tmp_path) == {NAME: CONTENT}


async def test_a_span_that_is_refused_starts_the_file_over(kind: Client, tmp_path: Path) -> None:
    (tmp_path / PARTIAL).write_bytes(partial(0, 40_000, 0, 0, 0))

    def send(handler: Handler, content: bytes, start: int, end: int) -> None:
        if start == 140_000:
            return handler.json(416, error_json("range_not_satisfiable"))
        return send_range(handler, content, start, end)

    with stored({NAME: CONTENT}, send) as server:
        await download(kind, server, tmp_path)
    assert on_disk(tmp_path) == {NAME: CONTENT}


@pytest.mark.parametrize("fault", ["wrong", "longer", "elsewhere"])
async def test_what_is_not_the_file_never_gets_its_name(kind: Client, tmp_path: Path, fault: str) -> None:
    def send(handler: Handler, content: bytes, start: int, end: int) -> None:
        body = {"wrong": bytes(end - start), "longer": content[start:end] + b"x"}.get(fault, content[start:end])
        first = start + (fault == "elsewhere")
        handler.whole(206, body, **{"Content-Range": f"bytes {first}-{end - 1}/{SIZE}"})

    with stored({NAME: CONTENT}, send) as server, pytest.raises(DownloadError):
        await download(kind, server, tmp_path)
    assert NAME not in on_disk(tmp_path)
    assert fault == "elsewhere" or on_disk(tmp_path) == {}


async def test_one_file_that_fails_ends_all_and_what_came_is_kept(kind: Client, tmp_path: Path) -> None:
    small = {f"{n}.bin": bytes([n]) * 1000 for n in range(3)}
    fails = True

    def send(handler: Handler, content: bytes, start: int, end: int) -> None:
        if fails and len(content) == SIZE and start == 3 * SPAN:
            return handler.json(404, error_json("file_not_found"))
        return send_range(handler, content, start, end)

    with stored({**small, NAME: CONTENT}, send) as server:
        with pytest.raises(NotFoundError):
            await download(kind, server, tmp_path)
        assert NAME not in on_disk(tmp_path)
        fails = False
        server.seen.clear()
        await download(kind, server, tmp_path)
        assert SPAN <= sum(end - start for start, end in ranges(server)) <= SIZE
    assert on_disk(tmp_path) == {**small, NAME: CONTENT}


async def test_a_callback_that_raises_ends_the_download(kind: Client, tmp_path: Path) -> None:
    def refuse(done: int, total: int) -> None:
        if done > SPAN:
            raise KeyError("enough")

    with stored({NAME: CONTENT}) as server:
        with pytest.raises(KeyError, match="enough"):
            await download(kind, server, tmp_path, on_progress=refuse)
        await download(kind, server, tmp_path)
    assert on_disk(tmp_path) == {NAME: CONTENT}


async def test_a_server_that_goes_away_is_given_up(kind: Client, tmp_path: Path) -> None:
    with (
        stored({NAME: CONTENT}, lambda handler, *_: handler.json(503, error_json("away"))) as server,
        pytest.raises(APIError, match="away"),
    ):
        await download(kind, server, tmp_path)
    assert on_disk(tmp_path) == {}


async def test_four_files_that_fail_at_once_are_one_error(
    kind: Client, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    (tmp_path / "elsewhere").mkdir()
    (tmp_path / "out").mkdir()
    (tmp_path / "out" / "sub").symlink_to(tmp_path / "elsewhere")
    with stored({f"sub/{n}": b"1" for n in range(4)}) as server, pytest.raises(DownloadError, match="leads out"):
        await download(kind, server, tmp_path / "out")
    gc.collect()
    assert not [record for record in caplog.records if record.name == "asyncio"], "no task's error is left unheard"
