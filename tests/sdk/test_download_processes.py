from __future__ import annotations

import os
import subprocess
import sys
import threading
import time as clock
from collections.abc import Callable
from pathlib import Path

from .store import FILES, PARTIAL, SIZE, fetches, on_disk, send_rest, store
from .support import KEY, Handler, HttpServer, serving

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
