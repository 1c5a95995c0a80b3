from __future__ import annotations

import hashlib
import os
import struct
import subprocess
import sys
import threading
import time as clock
from collections.abc import Callable
from pathlib import Path

from .store import BIG, FILES, PARTIAL, SIZE, fetches, on_disk, send_rest, store, wanted
from .support import KEY, Handler, HttpServer, Seen, checkpoint_json, serving

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


BIG_CONTENT = os.urandom(1 << 20) * 80  # three spans of 32 MiB at the real size
BIG_PARTIAL = f".{BIG}.{hashlib.sha256(BIG_CONTENT).hexdigest()[:12]}.part"
SPANS = 3


class HoldingSpans:
    """Sends 40 % of every span and holds the rest back until it is let go."""

    def __init__(self) -> None:
        self.go = threading.Event()
        self.ranges: list[tuple[int, int]] = []

    def __call__(self, handler: Handler, seen: Seen) -> None:
        if "/files/" not in seen.path:
            return handler.json(200, checkpoint_json({BIG: BIG_CONTENT}))
        start, end = wanted(seen, len(BIG_CONTENT))
        self.ranges.append((start, end))
        where = f"bytes {start}-{end - 1}/{len(BIG_CONTENT)}"
        handler.head(206, **{"Content-Length": str(end - start), "Content-Range": where})
        held = end if self.go.is_set() else start + (end - start) * 2 // 5
        handler.wfile.write(BIG_CONTENT[start:held])
        if held < end:
            assert self.go.wait(60)
            handler.wfile.write(BIG_CONTENT[held:end])
        return None


def counts(path: Path) -> list[int]:
    """The bytes of each span that a partial says are there: the numbers behind its content."""
    if size_of(path) != len(BIG_CONTENT) + 8 * SPANS:
        return []
    with path.open("rb") as file:
        file.seek(len(BIG_CONTENT))
        return list(struct.unpack(f"<{SPANS}Q", file.read()))


def test_d14_a_big_file_killed_at_40_percent_of_every_span_asks_only_for_the_rest(tmp_path: Path) -> None:
    hold = HoldingSpans()
    with serving(hold) as server:
        first = program(server, tmp_path)
        until(lambda: len(hold.ranges) == SPANS)
        at = sorted((start, end, start + (end - start) * 2 // 5) for start, end in hold.ranges)
        until(lambda: counts(tmp_path / BIG_PARTIAL) == [held - start for start, _, held in at])
        first.kill()
        assert first.wait() == -9
        hold.go.set()
        hold.ranges.clear()
        assert program(server, tmp_path).wait(60) == 0
        assert sorted(hold.ranges) == [(held, end) for _, end, held in at]
    assert on_disk(tmp_path) == {BIG: BIG_CONTENT}, "the right content and 0 leftovers"


def test_d14_two_processes_at_once_fetch_every_span_of_a_big_file_once(tmp_path: Path) -> None:
    hold = HoldingSpans()
    with serving(hold) as server:
        both = [program(server, tmp_path) for _ in range(2)]
        until(lambda: len(hold.ranges) == SPANS)
        until(lambda: len([seen for seen in server.seen if seen.path.endswith("ckpt_1")]) == 2)
        clock.sleep(0.3)  # the second one is at the lock by now
        hold.go.set()
        assert [one.wait(60) for one in both] == [0, 0]
        assert len(hold.ranges) == SPANS, "every byte went over the wire once"
    assert on_disk(tmp_path) == {BIG: BIG_CONTENT}
