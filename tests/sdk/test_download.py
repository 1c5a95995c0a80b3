from __future__ import annotations

import hashlib
import os
import re
import subprocess
import sys
import threading
import time as clock
from collections.abc import Callable
from pathlib import Path
from typing import Any
from urllib.parse import unquote

import pytest

from finery import APIError, DownloadError

from .support import BOTH, KEY, Client, Handler, HttpServer, Seen, Time, checkpoint_json, error_json, serving, value

FILES = {
    "adapter_config.json": b'{"r": 16}',
    "adapter_model.safetensors": bytes(range(256)) * 4000,
    "sub dir/ä.txt": "grüße".encode(),
    "empty": b"",
}
BIG = "adapter_model.safetensors"
SIZE = len(FILES[BIG])
SHA12 = hashlib.sha256(FILES[BIG]).hexdigest()[:12]
PARTIAL = f".{BIG}.{SHA12}.part"
Send = Callable[[Handler, bytes, int], None]


def first_byte(seen: Seen) -> int:
    found = re.fullmatch(r"bytes=(\d+)-", seen.headers.get("range", "bytes=0-"))
    assert found, seen.headers
    return int(found[1])


def send_rest(handler: Handler, content: bytes, start: int) -> None:
    if start == 0:
        return handler.whole(200, content)
    where = f"bytes {start}-{len(content) - 1}/{len(content)}"
    return handler.whole(206, content[start:], **{"Content-Range": where})


def store(
    files: dict[str, bytes] = FILES, send: Send = send_rest, **checkpoint: Any
) -> Callable[[Handler, Seen], None]:

    def reply(handler: Handler, seen: Seen) -> None:
        prefix = "/v1/checkpoints/ckpt_1"
        if seen.path == prefix:
            return handler.json(200, checkpoint_json(files))
        content = files[unquote(seen.path.removeprefix(f"{prefix}/files/"))]
        return send(handler, content, first_byte(seen))

    return reply


def fetches(server: HttpServer, name: str = BIG) -> list[int]:
    return [first_byte(seen) for seen in server.seen if seen.path.endswith(f"/files/{name}")]


def on_disk(folder: Path) -> dict[str, bytes]:
    return {str(path.relative_to(folder)): path.read_bytes() for path in folder.rglob("*") if path.is_file()}


def client_of(kind: Client, server: HttpServer, time: Time | None = None) -> Any:
    return kind(KEY, server.url, runtime=(time or Time()).runtime())


@pytest.fixture(params=BOTH)
def kind(request: pytest.FixtureRequest) -> Client:
    kind: Client = request.param
    return kind


async def test_all_files_arrive_and_progress_ends_at_the_total(kind: Client, tmp_path: Path) -> None:
    told: list[tuple[int, int]] = []
    with serving(store()) as server:
        client = client_of(kind, server)
        out = await value(
            client.checkpoints.download("ckpt_1", tmp_path / "out", on_progress=lambda *at: told.append(at))
        )
    assert out == tmp_path / "out"
    assert on_disk(out) == FILES
    total = sum(map(len, FILES.values()))
    assert [done for done, _ in told] == sorted(done for done, _ in told)
    assert (told[-1], {of for _, of in told}) == ((total, total), {total})


async def test_what_is_there_already_is_proved_and_not_fetched(kind: Client, tmp_path: Path) -> None:
    with serving(store()) as server:
        client = client_of(kind, server)
        await value(client.checkpoints.download("ckpt_1", tmp_path))
        (tmp_path / BIG).write_bytes(bytes(SIZE))  # right size, wrong content
        server.seen.clear()
        await value(client.checkpoints.download("ckpt_1", tmp_path))
        assert [seen.path.rsplit("/", 1)[1] for seen in server.seen] == ["ckpt_1", BIG]
    assert on_disk(tmp_path) == FILES


async def test_a_cut_connection_goes_on_from_the_bytes_that_came(kind: Client, tmp_path: Path) -> None:
    def send(handler: Handler, content: bytes, start: int) -> None:
        if len(content) < SIZE or start >= SIZE // 2:
            return send_rest(handler, content, start)
        status = 206 if start else 200
        where = f"bytes {start}-{SIZE - 1}/{SIZE}"
        handler.head(status, **{"Content-Length": str(SIZE - start), "Content-Range": where})
        handler.wfile.write(content[start : start + SIZE // 10])
        return handler.cut()

    with serving(store(send=send)) as server:
        await value(client_of(kind, server).checkpoints.download("ckpt_1", tmp_path))
        assert fetches(server) == [SIZE // 10 * n for n in range(6)], "more cuts than a plain call has attempts"
    assert on_disk(tmp_path) == FILES


async def test_a_server_that_brings_nothing_is_given_up_after_three_tries(kind: Client, tmp_path: Path) -> None:
    def send(handler: Handler, content: bytes, start: int) -> None:
        if len(content) < SIZE:
            return send_rest(handler, content, start)
        return handler.json(503, error_json("away"))

    with serving(store(send=send)) as server:
        with pytest.raises(APIError, match="away"):
            await value(client_of(kind, server).checkpoints.download("ckpt_1", tmp_path))
        assert fetches(server) == [0, 0, 0]
    assert PARTIAL not in on_disk(tmp_path)


@pytest.mark.parametrize("left", [1, SIZE // 3, SIZE - 1])
async def test_a_partial_of_an_earlier_run_is_completed(kind: Client, tmp_path: Path, left: int) -> None:
    (tmp_path / PARTIAL).write_bytes(FILES[BIG][:left])
    with serving(store()) as server:
        await value(client_of(kind, server).checkpoints.download("ckpt_1", tmp_path))
        assert fetches(server) == [left]
    assert on_disk(tmp_path) == FILES


async def test_a_whole_partial_is_proved_and_named_without_a_fetch(kind: Client, tmp_path: Path) -> None:
    (tmp_path / PARTIAL).write_bytes(FILES[BIG])
    with serving(store()) as server:
        await value(client_of(kind, server).checkpoints.download("ckpt_1", tmp_path))
        assert fetches(server) == []
    assert on_disk(tmp_path) == FILES


@pytest.mark.parametrize("rubbish", [bytes(SIZE // 2), bytes(SIZE), bytes(SIZE + 9)])
async def test_a_spoilt_partial_is_thrown_away_and_fetched_anew(kind: Client, tmp_path: Path, rubbish: bytes) -> None:
    (tmp_path / PARTIAL).write_bytes(rubbish)
    with serving(store()) as server:
        await value(client_of(kind, server).checkpoints.download("ckpt_1", tmp_path))
        assert fetches(server)[-1] == 0
        assert len(fetches(server)) <= 2
    assert on_disk(tmp_path) == FILES


async def test_a_server_without_ranges_sends_all_again(kind: Client, tmp_path: Path) -> None:
    (tmp_path / PARTIAL).write_bytes(FILES[BIG][:1000])
    with serving(store(send=lambda handler, content, start: handler.whole(200, content))) as server:
        await value(client_of(kind, server).checkpoints.download("ckpt_1", tmp_path))
        assert fetches(server) == [1000]
    assert on_disk(tmp_path) == FILES


async def test_a_range_that_the_server_refuses_starts_over(kind: Client, tmp_path: Path) -> None:
    def send(handler: Handler, content: bytes, start: int) -> None:
        if start:
            return handler.json(416, error_json("range_not_satisfiable"))
        return handler.whole(200, content)

    (tmp_path / PARTIAL).write_bytes(FILES[BIG][:1000])
    with serving(store(send=send)) as server:
        await value(client_of(kind, server).checkpoints.download("ckpt_1", tmp_path))
        assert fetches(server) == [1000, 0]
    assert on_disk(tmp_path) == FILES


@pytest.mark.parametrize("found", ["bytes 0-9/10", "", "bytes 999-1023999/1024000"])
async def test_a_wrong_range_is_never_written(kind: Client, tmp_path: Path, found: str) -> None:
    def send(handler: Handler, content: bytes, start: int) -> None:
        if not start:
            return handler.whole(200, content)
        return handler.whole(206, content[start:], **({"Content-Range": found} if found else {}))

    (tmp_path / PARTIAL).write_bytes(FILES[BIG][:1000])
    with serving(store(send=send)) as server, pytest.raises(DownloadError, match="expected bytes from 1000"):
        await value(client_of(kind, server).checkpoints.download("ckpt_1", tmp_path))
    assert (tmp_path / PARTIAL).read_bytes() == FILES[BIG][:1000]


@pytest.mark.parametrize("content", [b"y" * 10, b"x" * 11], ids=["other bytes", "too many"])
async def test_content_that_is_not_the_checkpoints_never_gets_its_name(
    kind: Client, tmp_path: Path, content: bytes
) -> None:
    def send(handler: Handler, true: bytes, start: int) -> None:
        handler.whole(200, content)

    with serving(store({"a": b"x" * 10}, send)) as server, pytest.raises(DownloadError, match="a was discarded"):
        await value(client_of(kind, server).checkpoints.download("ckpt_1", tmp_path))
    assert on_disk(tmp_path) == {}


async def test_an_answer_that_ends_early_is_not_taken_for_the_file(kind: Client, tmp_path: Path) -> None:
    def send(handler: Handler, true: bytes, start: int) -> None:
        handler.whole(206 if start else 200, b"", **{"Content-Range": f"bytes {start}-{start}/10"})

    with serving(store({"a": b"x" * 10}, send)) as server, pytest.raises(APIError, match="ended after 0 of 10 bytes"):
        await value(client_of(kind, server).checkpoints.download("ckpt_1", tmp_path))
    assert on_disk(tmp_path) == {}


EVIL = ["../a", "a/../../b", "/etc/passwd", "a//b", "", ".", "a/.", "c:\\x", "..\\a", "a\nb", "a\x00b", "a/"]


@pytest.mark.parametrize("path", EVIL)
async def test_a_path_that_leaves_the_folder_is_refused_before_anything_is_written(
    kind: Client, tmp_path: Path, path: str
) -> None:
    with serving(store({"fine": b"1", path: b"evil"})) as server:
        with pytest.raises(DownloadError, match="Refused the file name"):
            await value(client_of(kind, server).checkpoints.download("ckpt_1", tmp_path / "out"))
        assert len(server.seen) == 1
    assert os.listdir(tmp_path) == []


async def test_a_link_that_leads_out_of_the_folder_is_not_followed(kind: Client, tmp_path: Path) -> None:
    (tmp_path / "elsewhere").mkdir()
    (tmp_path / "out").mkdir()
    (tmp_path / "out" / "sub").symlink_to(tmp_path / "elsewhere")
    with serving(store({"sub/a": b"1"})) as server, pytest.raises(DownloadError, match="leads out"):
        await value(client_of(kind, server).checkpoints.download("ckpt_1", tmp_path / "out"))
    assert os.listdir(tmp_path / "elsewhere") == []


PROGRAM = "import sys; from finery import Finery; Finery().checkpoints.download('ckpt_1', sys.argv[1])"


def program(server: HttpServer, folder: Path) -> subprocess.Popen[bytes]:
    environment = {**os.environ, "FINERY_API_KEY": KEY, "FINERY_BASE_URL": server.url}
    return subprocess.Popen([sys.executable, "-c", PROGRAM, str(folder)], env=environment)


class Holding:
    """Sends 40 % of the big file and holds the rest back until it is let go."""

    def __init__(self) -> None:
        self.go = threading.Event()

    def __call__(self, handler: Handler, content: bytes, start: int) -> None:
        if len(content) < SIZE or self.go.is_set():
            return send_rest(handler, content, start)
        handler.head(200, **{"Content-Length": str(SIZE)})
        handler.wfile.write(content[: SIZE * 2 // 5])
        assert self.go.wait(60)
        handler.wfile.write(content[SIZE * 2 // 5 :])
        return None


def until(condition: Callable[[], bool]) -> None:
    deadline = clock.monotonic() + 60
    while not condition():
        assert clock.monotonic() < deadline
        clock.sleep(0.01)


def size_of(path: Path) -> int:
    return path.stat().st_size if path.exists() else 0


def test_d14_killed_at_40_percent_and_run_again_only_the_missing_bytes_are_fetched(tmp_path: Path) -> None:
    hold = Holding()
    with serving(store(send=hold)) as server:
        first = program(server, tmp_path)
        until(lambda: size_of(tmp_path / PARTIAL) == SIZE * 2 // 5)
        first.kill()
        assert first.wait() == -9
        hold.go.set()
        assert program(server, tmp_path).wait(60) == 0
        assert fetches(server) == [0, SIZE * 2 // 5]
    assert on_disk(tmp_path) == FILES, "the right content and 0 leftovers"


def test_d14_two_processes_at_once_share_the_work_and_corrupt_nothing(tmp_path: Path) -> None:
    hold = Holding()
    with serving(store(send=hold)) as server:
        first = program(server, tmp_path)
        until(lambda: size_of(tmp_path / PARTIAL) == SIZE * 2 // 5)
        second = program(server, tmp_path)
        until(lambda: len([seen for seen in server.seen if seen.path.endswith("ckpt_1")]) == 2)
        clock.sleep(0.3)  # the second one is at the lock by now; were there none, it would fetch from 409600
        hold.go.set()
        assert (first.wait(60), second.wait(60)) == (0, 0)
        assert fetches(server) == [0], "the file went over the wire once"
    assert on_disk(tmp_path) == FILES


def test_d14_the_one_that_waits_goes_on_when_the_other_is_killed(tmp_path: Path) -> None:
    hold = Holding()
    with serving(store(send=hold)) as server:
        first = program(server, tmp_path)
        until(lambda: size_of(tmp_path / PARTIAL) == SIZE * 2 // 5)
        second = program(server, tmp_path)
        until(lambda: len([seen for seen in server.seen if seen.path.endswith("ckpt_1")]) == 2)
        first.kill()
        first.wait()
        hold.go.set()
        assert second.wait(60) == 0
        assert fetches(server) == [0, SIZE * 2 // 5]
    assert on_disk(tmp_path) == FILES
