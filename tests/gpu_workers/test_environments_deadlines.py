"""Deadlines that kill, processes that are lost, and what happens where there is no sandbox."""

from __future__ import annotations

import errno
import os
import signal
import subprocess
import time
from contextlib import suppress
from pathlib import Path

import pytest

from finery_gpu_workers.environments.types import Answer
from finery_gpu_workers.errors import WorkerError
from finery_gpu_workers.sandbox import backend as backends
from finery_gpu_workers.sandbox import process
from finery_gpu_workers.sandbox.backend import Backend
from finery_gpu_workers.sandbox.limits import SandboxUnavailable

from .test_environments import failed, python, rewards_of


def test_each_of_three_that_hang_is_a_timeout_and_the_others_get_their_rewards(tmp_path: Path) -> None:
    source = (
        "import signal, time\n"
        "def grade(sample, item):\n"
        "    if item['kind'] == 'power': return 5**(5**(5**5))\n"
        "    if item['kind'] == 'sleep': time.sleep(3600)\n"
        "    if item['kind'] == 'deaf':\n"
        "        signal.signal(signal.SIGTERM, signal.SIG_IGN)\n"
        "        while True: pass\n"
        "    return 0.5\n"
    )
    kinds = ["power", "good", "sleep", "good", "deaf", "good", "good"]
    before = set(_below(os.getpid()))
    with rewards_of(python(source, timeout_seconds=2), tmp_path, workers=2) as rewards:
        grades = [rewards.submit(Answer("", {"kind": kind})) for kind in kinds]
        done = [grade.result(60) for grade in grades]
        for kind, grade in zip(kinds, done, strict=True):
            if kind == "good":
                assert grade.reward == 0.5
            else:
                assert failed(grade)[0] == "timeout"
                assert 2.0 <= grade.seconds < 5.0
        assert done[0].cpu_seconds > 0.2 > done[2].cpu_seconds
        processes = set(_below(os.getpid())) - before
        assert len(processes) >= 2
    assert [pid for pid in processes if Path(f"/proc/{pid}").exists()] == []


def _below(pid: int) -> list[int]:
    found, waiting = [], [pid]
    while waiting:
        for task in Path(f"/proc/{waiting.pop()}/task").glob("*/children"):
            try:
                children = [int(child) for child in task.read_text().split()]
            except OSError:
                continue
            found += children
            waiting += children
    return found


def _programs() -> list[int]:
    """What runs graders: the innermost processes with the harness as their text."""
    found = []
    for pid in _below(os.getpid()):
        try:
            command = Path(f"/proc/{pid}/cmdline").read_bytes().split(b"\0")
        except OSError:
            continue
        if command[0] != b"bwrap" and any(part.startswith(b'"""Runs inside') for part in command):
            found.append(pid)
    return found


def test_a_killed_process_is_replaced_once_and_then_the_grade_is_lost(tmp_path: Path) -> None:
    source = "import time\ndef grade(sample, item):\n    time.sleep(item['seconds'])\n    return 0.75\n"
    before = set(_programs())
    with rewards_of(python(source, timeout_seconds=60), tmp_path) as rewards:
        assert rewards.submit(Answer("", {"seconds": 0})).result().reward == 0.75
        [first] = set(_programs()) - before
        future = rewards.submit(Answer("", {"seconds": 1}))
        time.sleep(0.2)
        os.kill(first, signal.SIGKILL)
        assert future.result(30).reward == 0.75
        future = rewards.submit(Answer("", {"seconds": 3600}))
        killed: set[int] = set()
        deadline = time.monotonic() + 30
        while not future.done() and time.monotonic() < deadline:
            for pid in set(_programs()) - before - killed:
                time.sleep(0.1)
                with suppress(ProcessLookupError):  # it died with the one before
                    os.kill(pid, signal.SIGKILL)
                killed.add(pid)
            time.sleep(0.02)
        assert failed(future.result(0))[0] == "lost"
        assert rewards.submit(Answer("", {"seconds": 0})).result().reward == 0.75


def test_a_hanging_import_is_an_error_of_the_environment(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    from finery_gpu_workers.environments import calls

    monkeypatch.setattr(calls, "_LOAD_SECONDS", 1.0)
    with (
        pytest.raises(WorkerError, match="loading took longer than 1 s") as found,
        rewards_of(python("while True: pass"), tmp_path),
    ):
        pass
    assert (found.value.code, found.value.param) == ("invalid_environment", "environment.grader.source")


def test_closing_ends_what_runs_and_what_waits(tmp_path: Path) -> None:
    source = "import time\ndef grade(sample, item): time.sleep(600)\n"
    with rewards_of(python(source, timeout_seconds=100), tmp_path) as rewards:
        running, waiting = rewards.submit(Answer("", {})), rewards.submit(Answer("", {}))
        while not running.running():
            time.sleep(0.01)
        began = time.monotonic()
    assert time.monotonic() - began < 15
    assert failed(running.result(0))[0] == "lost"
    assert waiting.cancelled()
    with pytest.raises(RuntimeError, match="closed"):
        rewards.submit(Answer("", {}))


def test_where_there_is_no_sandbox_no_code_runs(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def broken(kind: str) -> Backend:
        raise SandboxUnavailable(f"{kind} is off")

    monkeypatch.setattr(process, "probe", broken)
    backends.choose.cache_clear()
    canary = tmp_path / "canary"
    with pytest.raises(WorkerError) as found, rewards_of(python(f"open({str(canary)!r}, 'w')"), tmp_path):
        pass
    assert found.value.code == "sandbox_unavailable"
    assert not canary.exists()
    backends.choose.cache_clear()


def test_graders_work_where_code_may_not_fork(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The backend of an ordinary user without namespaces: each answer gets a process, which ends with it."""
    monkeypatch.setattr(backends, "choose", lambda: Backend("landlock", own_user=False))
    source = (
        "import os, time\nseen = []\ndef grade(sample, item):\n    print('hi')\n    seen.append(1)\n"
        "    if item['kind'] == 'sleep': time.sleep(600)\n    if item['kind'] == 'fork': os.fork()\n"
        "    return len(seen)\n"
    )
    with rewards_of(python(source, timeout_seconds=1), tmp_path) as rewards:
        grades = [rewards.submit(Answer("", {"kind": kind})).result() for kind in ("", "", "sleep", "fork", "")]
    assert [grade.reward for grade in grades] == [1.0, 1.0, None, None, 1.0]
    assert grades[0].printed == "hi\n"
    assert [failed(grade)[0] for grade in grades[2:4]] == ["timeout", "error"]


def test_a_machine_that_is_short_for_a_while_loses_grades_and_not_the_job(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    source = "import time\ndef grade(sample, item):\n    time.sleep(item['seconds'])\n    return 1\n"

    def short(*_: object, **__: object) -> subprocess.Popen[bytes]:
        raise BlockingIOError(errno.EAGAIN, "no process is left")

    with rewards_of(python(source, timeout_seconds=1), tmp_path) as rewards:
        assert failed(rewards.submit(Answer("", {"seconds": 60})).result())[0] == "timeout"
        open_files = len(os.listdir("/proc/self/fd"))
        with monkeypatch.context() as patch:
            patch.setattr("finery_gpu_workers.sandbox.process.subprocess.Popen", short)
            code, message = failed(rewards.submit(Answer("", {"seconds": 0})).result())
        assert (code, "no process is left" in message) == ("lost", True)
        assert len(os.listdir("/proc/self/fd")) == open_files
        assert rewards.submit(Answer("", {"seconds": 0})).result().reward == 1
