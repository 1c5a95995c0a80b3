"""The sandbox's life: limits, deadlines, and that nothing of it is left, whoever is killed."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path

import pytest

from finery_gpu_workers.sandbox import backend as backends
from finery_gpu_workers.sandbox.backend import Backend
from finery_gpu_workers.sandbox.limits import Limits
from finery_gpu_workers.sandbox.process import Ended, Sandbox, TimeIsOver

pytestmark = pytest.mark.skipif(sys.platform != "linux", reason="the sandbox is one of Linux")
ROOT = os.geteuid() == 0
MIB = 2**20
# A server of statements: the value of `answer` after each is the reply.
SERVER = """
import os, signal, sys, time
for line in os.fdopen(0, "rb"):
    scope = {"answer": None}
    try:
        exec(line.decode().replace("\\\\n", "\\n"), globals(), scope)
    except Exception as error:
        scope["answer"] = type(error).__name__
    os.write(3, (repr(scope["answer"]) + "\\n").encode())
"""
FORKING = """answer = 1
for n in range(5):
    if os.fork() == 0:
        os.setsid()
        os.fork()
        time.sleep(600)"""
SHARING = """x = b'x' * (60 << 20)
for n in range(4):
    if os.fork() == 0:
        time.sleep(600)
time.sleep(0.5)
answer = hash('x')"""
EATING = """for n in range(3):
    if os.fork() == 0:
        x = b'x' * (80 << 20)
        time.sleep(600)
time.sleep(600)"""
EATING_APART = """for n in range(3):
    if os.fork() == 0:
        if os.fork() == 0:
            x = b'x' * (80 << 20)
            time.sleep(600)
        os._exit(0)
time.sleep(600)"""
SPINNING = """ours, theirs = os.pipe()
for n in range(2):
    if os.fork() == 0:
        while time.process_time() < 0.4: pass
        os.write(theirs, b'x')
        time.sleep(600)
answer = len(os.read(ours, 1) + os.read(ours, 1))"""
FLOODING = "for n in range(50): os.write(1, bytes(1 << 20)); os.write(2, bytes(1 << 20))\nanswer = 1"
ECHO = "import os\nfor line in os.fdopen(0, 'rb'):\n    os.fdopen(os.dup(3), 'wb').write(line)"


@pytest.fixture(params=backends.KINDS)
def backend(request: pytest.FixtureRequest) -> Backend:
    return Backend(request.param, own_user=ROOT)


def ask(sandbox: Sandbox, code: str, seconds: float = 10.0) -> str:
    return sandbox.ask(code.replace("\n", "\\n").encode(), seconds).decode()


def until(condition: Callable[[], bool], seconds: float = 10.0) -> None:
    deadline = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < deadline, "it did not happen"
        time.sleep(0.01)


def below(pid: int) -> list[int]:
    """Processes that come from this one, those that detached themselves included: the keeper adopts them."""
    found, waiting = [], [pid]
    while waiting:
        try:
            for task in Path(f"/proc/{waiting.pop()}/task").iterdir():
                children = [int(child) for child in (task / "children").read_text().split()]
                found += children
                waiting += children
        except OSError:
            continue
    return found


def alive(pids: list[int]) -> list[int]:
    return [pid for pid in pids if Path(f"/proc/{pid}").exists()]


@pytest.mark.parametrize(
    "code",
    [
        "answer = 5**(5**(5**5))",
        "time.sleep(3600)",
        "signal.signal(signal.SIGTERM, signal.SIG_IGN)\nwhile True: pass",
        f"{FORKING}\nwhile True: time.sleep(1)",
    ],
)
def test_at_the_deadline_everything_is_dead(backend: Backend, code: str) -> None:
    sandbox = Sandbox(SERVER, backend=backend)
    assert ask(sandbox, "answer = 7") == "7"
    began = time.monotonic()
    seen = below(sandbox.pid)
    with pytest.raises(TimeIsOver, match=r"no answer within 0\.5 s"):
        ask(sandbox, code, 0.5)
    assert time.monotonic() - began < 3.5
    assert len(seen) >= 1
    assert alive([sandbox.pid, *seen]) == []
    assert of_uid(sandbox) == []


def of_uid(sandbox: Sandbox) -> list[str]:
    """All processes of the sandbox's own user."""
    uid = sandbox._uid
    if uid is None:
        return []
    return [entry.name for entry in os.scandir("/proc") if entry.name.isdigit() and _uid(entry) == uid]


def _uid(entry: os.DirEntry[str]) -> int | None:
    try:
        return entry.stat().st_uid
    except OSError:
        return None


def test_what_is_left_running_dies_with_the_sandbox(backend: Backend) -> None:
    sandbox = Sandbox(SERVER, backend=backend)
    assert ask(sandbox, FORKING) == "1"
    until(lambda: len(below(sandbox.pid)) >= 11)
    left = below(sandbox.pid)
    sandbox.stop()
    assert alive(left) == []
    assert of_uid(sandbox) == []


def test_a_fork_bomb_is_bounded_and_dies(backend: Backend) -> None:
    sandbox = Sandbox(SERVER, backend=backend, limits=Limits(processes=20))
    with pytest.raises((TimeIsOver, Ended)):
        ask(sandbox, "while True:\n    try: os.fork()\n    except OSError: pass", 1.0)
    assert of_uid(sandbox) == []


@pytest.mark.parametrize("eating", [EATING, EATING_APART], ids=["children", "detached"])
def test_processes_that_together_take_too_much_memory_are_ended(backend: Backend, eating: str) -> None:
    sandbox = Sandbox(SERVER, backend=backend, limits=Limits(memory_bytes=150 * MIB))
    with pytest.raises(Ended, match="more memory"):
        ask(sandbox, eating, 20.0)


def test_more_memory_than_a_process_may_have_is_refused(backend: Backend) -> None:
    sandbox = Sandbox(SERVER, backend=backend, limits=Limits(memory_bytes=150 * MIB))
    assert ask(sandbox, "x = b'x' * (300 << 20)") == "'MemoryError'"
    sandbox.stop()


def test_memory_that_processes_share_counts_once(backend: Backend) -> None:
    hashes = set()
    for _ in range(2):
        sandbox = Sandbox(SERVER, backend=backend, limits=Limits(memory_bytes=150 * MIB))
        hashes.add(ask(sandbox, SHARING, 20.0))
        sandbox.stop()
    assert len(hashes) == 1  # and a grader that walks through a set does so in the same order each time


def test_it_dies_when_its_parent_is_killed(backend: Backend, tmp_path: Path) -> None:
    code = f"""
import sys, time
from finery_gpu_workers.sandbox.backend import Backend
from finery_gpu_workers.sandbox.process import Sandbox
sandbox = Sandbox({SERVER!r}, backend=Backend({backend.kind!r}, own_user={backend.own_user}))
sandbox.ask({FORKING.replace(chr(10), chr(92) + "n").encode()!r}, 10.0)
print(sandbox.pid, flush=True)
time.sleep(600)
"""
    parent = subprocess.Popen([sys.executable, "-c", code], stdout=subprocess.PIPE, text=True)
    assert parent.stdout is not None
    keeper = int(parent.stdout.readline())
    until(lambda: len(below(keeper)) >= 11)
    pids = [keeper, *below(keeper)]
    parent.kill()
    parent.wait()
    parent.stdout.close()
    until(lambda: alive(pids) == [])


def test_it_dies_when_its_keeper_is_killed(backend: Backend) -> None:
    sandbox = Sandbox(SERVER, backend=backend)
    assert ask(sandbox, FORKING) == "1"
    until(lambda: len(below(sandbox.pid)) >= 11)
    pids = below(sandbox.pid)
    os.kill(sandbox.pid, signal.SIGKILL)
    with pytest.raises(Ended, match="killed"):
        ask(sandbox, "time.sleep(600)")
    if backend.kind == "bubblewrap" or ROOT:
        until(lambda: alive(pids) == [])


def test_another_thread_can_end_it(backend: Backend) -> None:
    import threading

    sandbox = Sandbox(SERVER, backend=backend)
    timer = threading.Timer(0.2, sandbox.interrupt)
    timer.start()
    with pytest.raises(Ended):
        ask(sandbox, "time.sleep(600)", 60.0)
    timer.join()


def test_the_cpu_time_of_what_was_killed_is_counted(backend: Backend) -> None:
    sandbox = Sandbox(SERVER, backend=backend)
    assert ask(sandbox, SPINNING, 60.0) == "2"
    assert 0.75 < sandbox.stop().cpu_seconds < 2.0


def test_what_it_prints_goes_nowhere(backend: Backend) -> None:
    sandbox = Sandbox(SERVER, backend=backend)
    assert (
        ask(sandbox, "for n in range(50): os.write(1, bytes(1 << 20)); os.write(2, bytes(1 << 20))\nanswer = 1") == "1"
    )
    sandbox.stop()


def test_a_long_line_is_sent_and_received(backend: Backend) -> None:
    sandbox = Sandbox(ECHO, backend=backend)
    assert sandbox.ask(b"x" * 3_000_000, 20.0) == b"x" * 3_000_000
    sandbox.stop()


def test_an_answer_without_an_end_is_not_kept(backend: Backend) -> None:
    sandbox = Sandbox(SERVER, backend=backend, limits=Limits(reply_bytes=MIB))
    with pytest.raises(Ended, match="longer than 1048576 bytes"):
        ask(sandbox, "while True: os.write(3, bytes(65536))")


def test_a_program_that_ends_says_how(backend: Backend) -> None:
    sandbox = Sandbox(SERVER, backend=backend)
    with pytest.raises(Ended, match="exit status 3"):
        ask(sandbox, "os._exit(3)")
    assert sandbox.stop().why == "ended"


def test_what_it_may_read_may_lie_below_tmp(backend: Backend) -> None:
    """As a virtual environment there does, though the sandbox has a /tmp of its own."""
    with tempfile.TemporaryDirectory(dir="/tmp") as name:
        folder = Path(name)
        folder.chmod(0o755)
        (folder / "module").write_text("seen")
        sandbox = Sandbox(SERVER, backend=backend, read=[name])
        assert ask(sandbox, f"answer = open('{folder}/module').read()") == "'seen'"
        assert ask(sandbox, f"try: open('{folder}/other', 'w')\nexcept OSError: answer = 1") == "1"
        sandbox.stop()
