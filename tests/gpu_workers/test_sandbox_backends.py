"""Which backend is taken, and as whom code runs."""

from __future__ import annotations

import os
import platform
import shutil
import signal
import subprocess
import sys
import sysconfig
from pathlib import Path

import pytest

import finery
import finery_gpu_workers
from finery_gpu_workers.sandbox import backend as backends
from finery_gpu_workers.sandbox import process
from finery_gpu_workers.sandbox.backend import Backend
from finery_gpu_workers.sandbox.limits import Limits, SandboxUnavailable
from finery_gpu_workers.sandbox.process import Ended, Sandbox

from .test_sandbox import ROOT, SERVER, ask, backend

__all__ = ["backend"]
pytestmark = pytest.mark.skipif(sys.platform != "linux", reason="the sandbox is one of Linux")


def of_kind(kind: str) -> Backend:
    return Backend("bubblewrap" if kind == "bubblewrap" else "landlock", own_user=ROOT and kind != "alone")


def test_it_runs_as_nobody_that_we_know(backend: Backend) -> None:
    if not ROOT:
        pytest.skip("an ordinary user has no other uids to give")
    sandboxes = [Sandbox(SERVER, backend=backend) for _ in range(2)]
    uids = {int(ask(sandbox, "answer = os.getuid()")) for sandbox in sandboxes}
    assert len(uids) == 2
    assert 0 not in uids
    for sandbox in sandboxes:
        assert ask(sandbox, "answer = os.getgroups()") in ("[]", "[65534]")
        sandbox.stop()


def test_without_a_backend_nothing_runs(monkeypatch: pytest.MonkeyPatch) -> None:
    def broken(kind: str) -> Backend:
        raise SandboxUnavailable(f"{kind} is off")

    monkeypatch.setattr(process, "probe", broken)
    backends.choose.cache_clear()
    with pytest.raises(SandboxUnavailable, match="bubblewrap: bubblewrap is off; landlock: landlock is off") as found:
        Sandbox(SERVER)
    assert found.value.code == "sandbox_unavailable"
    backends.choose.cache_clear()


def test_a_bubblewrap_that_does_not_work_is_not_chosen(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    refusing = tmp_path / "bwrap"
    refusing.write_text("#!/bin/sh\nexit 1\n")
    refusing.chmod(0o755)
    monkeypatch.setattr(backends, "bwrap", lambda: str(refusing))
    backends.choose.cache_clear()
    assert backends.choose().kind == "landlock"
    backends.choose.cache_clear()


def test_limits_are_above_zero() -> None:
    with pytest.raises(ValueError, match="found processes 0"):
        Limits(processes=0)


@pytest.mark.parametrize("order", [8, 10, 15])
def test_without_a_user_of_its_own_it_sends_no_signals_by_descriptors(order: int) -> None:
    """F_SETOWN, F_SETSIG, F_SETOWN_EX: kernels before 6.12 deliver them, so that the call itself is refused."""
    sandbox = Sandbox(SERVER, backend=of_kind("alone"))
    code = f"import fcntl; answer = fcntl.fcntl(os.pipe()[0], {order}, {os.getpid()} if {order} == 8 else bytes(8))"
    assert ask(sandbox, code) == "'PermissionError'"
    sandbox.stop()


OF_I386 = """import ctypes, mmap
code = mmap.mmap(-1, 4096, prot=7)
code.write(bytes.fromhex('b814000000cd80c3'))
answer = ctypes.CFUNCTYPE(ctypes.c_int)(ctypes.addressof(ctypes.c_char.from_buffer(code)))()"""
"""getpid by `int 0x80`, with the numbers of another machine, which the filter's do not mean."""
OF_X32 = "import ctypes; answer = ctypes.CDLL(None).syscall(0x40000000 + 39)"


@pytest.mark.skipif(platform.machine() != "x86_64", reason="a machine with three ways to make calls")
@pytest.mark.parametrize("kind", [*backends.KINDS, "alone"])
@pytest.mark.parametrize("code", [OF_I386, OF_X32], ids=["i386", "x32"])
def test_calls_by_the_numbers_of_another_machine_kill_it(kind: str, code: str) -> None:
    sandbox = Sandbox(SERVER, backend=of_kind(kind))
    with pytest.raises(Ended, match=r"signal 31|exit status 159"):
        ask(sandbox, code)
    outside = subprocess.run([sys.executable, "-c", code], check=False)
    assert -outside.returncode != signal.SIGSYS


@pytest.mark.parametrize("kind", [*backends.KINDS, "alone"])
def test_an_event_loop_works(kind: str) -> None:
    """It stands on a pair of sockets."""
    sandbox = Sandbox(SERVER, backend=of_kind(kind))
    assert ask(sandbox, "import asyncio; answer = asyncio.run(asyncio.sleep(0, 7))") == "7"
    sandbox.stop()


SYSTEM = shutil.which("python3", path="/usr/bin:/usr/local/bin")
WITHOUT_MOUNTS = """
import ctypes, os, sys
assert ctypes.CDLL(None).prctl(24, 21, 0, 0, 0) == 0  # CAP_SYS_ADMIN leaves the bounding set
os.execv(sys.argv[1], sys.argv[1:])
"""
LOOKING = """
import sys
from finery_gpu_workers.sandbox.process import Sandbox, probe
for kind in ("bubblewrap", "landlock"):
    sandbox = Sandbox({server!r}, backend=probe(kind))
    for code in {codes!r}:
        print(sandbox.ask(code.encode(), 10.0).decode())
    sandbox.stop()
"""


PACKAGE = next(Path("/usr/lib/python3/dist-packages").glob("*.py"), Path("/usr/lib/python3/dist-packages/none.py"))
LOOKS = [
    "answer = os.getuid() > 1000",
    "answer = os.path.isdir(os.environ['TMPDIR'])",
    "import sqlite3, ssl, ctypes; answer = 1",
    "answer = open('/etc/passwd')",
    f"answer = open({str(PACKAGE)!r}).read()",
]


def _system_python_is_ours() -> bool:
    """Another Python than ours, of the same version, so that it can load what is installed for ours."""
    if SYSTEM is None or os.path.realpath(SYSTEM) == backends.python() or not ROOT:
        return False
    code = "import sys; print(sys.version_info[:2])"
    shown = subprocess.run([SYSTEM, "-c", code], capture_output=True, text=True, check=False).stdout
    return shown.strip() == str(sys.version_info[:2])


@pytest.mark.skipif(not _system_python_is_ours(), reason="needs root and a second Python of the same version")
@pytest.mark.parametrize("mounts", [True, False])
def test_as_root_of_a_container(mounts: bool) -> None:
    """The system's Python, as in an image; `mounts`: with CAP_SYS_ADMIN, which containers seldom have."""
    path = [str(Path(finery_gpu_workers.__file__).parents[1]), str(Path(finery.__file__).parents[1])]
    environment = {"PYTHONPATH": ":".join([*path, sysconfig.get_path("purelib")]), "PATH": os.environ["PATH"]}
    command = [str(SYSTEM), "-c", LOOKING.format(server=SERVER, codes=LOOKS)]
    if not mounts:
        command = [sys.executable, "-c", WITHOUT_MOUNTS, *command]
    done = subprocess.run(command, capture_output=True, text=True, timeout=60, env=environment)
    assert done.returncode == 0, done.stderr
    lines = done.stdout.splitlines()
    assert lines[:5] == ["True", "True", "1", "'FileNotFoundError'", "'FileNotFoundError'"]
    assert lines[5:] == ["True", str(mounts), "1", "'PermissionError'", "'PermissionError'"]


@pytest.mark.skipif(not ROOT, reason="an ordinary user reads what it reads")
def test_a_python_that_cannot_be_reached_is_named() -> None:
    if os.stat(os.path.realpath(sys.base_prefix)).st_mode & 0o1 and not backends.python().startswith("/root/"):
        pytest.skip("this Python can be reached by all users")
    code = "from finery_gpu_workers.sandbox.backend import choose\nchoose()"
    command = [sys.executable, "-c", WITHOUT_MOUNTS, sys.executable, "-c", code]
    done = subprocess.run(command, capture_output=True, text=True, timeout=60)
    assert "sandbox_unavailable" in done.stderr
    assert "expected folders that every user may read, and mounts are not allowed" in done.stderr


AS_USER = """
import os, sys
from finery_gpu_workers.sandbox import backend, kernel, mounts
kernel.unshare(kernel.NEWNS)
kernel.mount(None, "/", None, kernel.REC | kernel.PRIVATE)
plan = {"read": [sys.prefix, *backend.readable()], "python": sys.executable, "bwrap": backend.bwrap()}
for top, paths in mounts._hidden(plan).items():
    mounts._uncover(top, paths)
os.setgroups([])
os.setresgid(54321, 54321, 54321)
os.setresuid(54321, 54321, 54321)
os.execv(sys.executable, [sys.executable, "-c", sys.argv[1], *sys.argv[2:]])
"""
OF_USER = """
import os, sys, time
from finery_gpu_workers.sandbox.process import Sandbox, probe
sandbox = Sandbox({server!r}, backend=probe({kind!r}))
assert not sandbox.backend.own_user and os.getuid() == 54321
for code in {codes!r}:
    print(sandbox.ask(code.encode(), 10.0).decode())
sandbox.stop()
"""


@pytest.mark.skipif(not ROOT, reason="for root, who can become an ordinary user; others are tested by the tests above")
@pytest.mark.parametrize("kind", backends.KINDS)
def test_for_an_ordinary_user(kind: str, tmp_path: Path) -> None:
    """Who cannot give code a uid of its own: namespaces, or else neither signals nor forks, keep it from theirs."""
    codes = [
        "answer = os.getuid()",
        "answer = os.listdir('/work')",
        "answer = os.kill(os.getppid() or 99999999, signal.SIGTERM)",
        "answer = open('/proc/%d/environ' % (os.getppid() or 99999999))",
        "import socket; socket.socket()",
        "answer = os.fork() and 'forked' or os._exit(0)",
        "answer = open(os.environ['TMPDIR'] + '/x', 'w').write('abc')",
        "import ctypes; answer = ctypes.CDLL(None).unshare(0x10000000)",
    ]
    code = OF_USER.format(server=SERVER, kind=kind, codes=codes)
    done = subprocess.run([sys.executable, "-c", AS_USER, code], capture_output=True, text=True, timeout=60)
    assert done.returncode == 0, done.stderr
    namespaces = kind == "bubblewrap"
    assert done.stdout.splitlines() == [
        "54321",
        repr("FileNotFoundError" if namespaces else "PermissionError"),
        repr("ProcessLookupError" if namespaces else "PermissionError"),
        repr("FileNotFoundError" if namespaces else "PermissionError"),
        "'PermissionError'",
        repr("forked" if namespaces else "PermissionError"),
        "3" if namespaces else "'FileNotFoundError'",
        "-1",
    ]
