"""What code in the sandbox tries, and does not get. Each attempt succeeds where there is no sandbox."""

from __future__ import annotations

import json
import os
import shutil
import socket
import subprocess
import sys
import sysconfig
import tempfile
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

import finery_gpu_workers
from finery_gpu_workers.sandbox import backend as backends
from finery_gpu_workers.sandbox.backend import Backend
from finery_gpu_workers.sandbox.limits import Limits
from finery_gpu_workers.sandbox.process import Sandbox

from .escapes import ATTEMPTS, source

pytestmark = pytest.mark.skipif(sys.platform != "linux", reason="the sandbox is one of Linux")
SOURCE = source()
SECRET = "secret-of-another-tenant"
ROOT = os.geteuid() == 0
KINDS = {
    "bubblewrap": Backend("bubblewrap", own_user=ROOT),
    "landlock": Backend("landlock", own_user=ROOT),
    "alone": Backend("landlock", own_user=False),
}
OF_AN_OWN_USER = {"raises_its_limits", "takes_priority"}
"""Stopped by the rights of the user, whom the backend `alone` does not change: here that is root, with them all."""
Try = Callable[[str], dict[str, Any]]


def _for_all(path: Path, kind: socket.SocketKind) -> socket.socket:
    """One that every user may send to."""
    bound = socket.socket(socket.AF_UNIX, kind)
    bound.bind(str(path))
    path.chmod(0o777)
    return bound


@pytest.fixture(scope="module")
def given(tmp_path_factory: pytest.TempPathFactory) -> Iterator[dict[str, Any]]:
    """Things that all users of this machine may reach."""
    folder = Path(tempfile.mkdtemp(prefix="finery-escapes-"))
    folder.chmod(0o777)
    canary = folder / "canary"
    canary.write_text(SECRET)
    canary.chmod(0o666)
    (folder / "mountpoint").mkdir()
    with socket.create_server(("127.0.0.1", 0)) as server, canary.open("rb") as held:
        by_name = socket.socket(socket.AF_UNIX)
        by_name.bind("\0" + folder.name)
        by_path = _for_all(folder / "socket", socket.SOCK_STREAM)
        for listening in (by_path, by_name):
            listening.listen()
        datagrams = _for_all(folder / "datagrams", socket.SOCK_DGRAM)
        os.set_inheritable(held.fileno(), True)
        command = [sys.executable, "-I", "-S", "-c", "import time; time.sleep(300)"]
        victim = subprocess.Popen(command, env={"FINERY_ATTEMPT_TOKEN": SECRET}, pass_fds=(held.fileno(),))
        yield {
            "secret": SECRET,
            "canary": str(canary),
            "folder": str(folder),
            "our_source": str(Path(finery_gpu_workers.__file__).parent / "run.py"),
            "packages": [sysconfig.get_path("purelib")],
            "victim": victim.pid,
            "victims_descriptor": held.fileno(),
            "keeper": victim.pid,
            "port": server.getsockname()[1],
            "unix_path": str(folder / "socket"),
            "unix_name": folder.name,
            "datagram_path": str(folder / "datagrams"),
            "outside": False,
        }
        victim.kill()
        victim.wait()
        for sock in (by_path, by_name, datagrams):
            sock.close()
    shutil.rmtree(folder)


@pytest.fixture(scope="module", params=KINDS)
def confined(request: pytest.FixtureRequest, given: dict[str, Any]) -> Iterator[Try]:
    """Tries an attempt in the sandbox."""
    backend = KINDS[request.param]
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("RAY_AUTH_TOKEN", SECRET)
        patch.setenv("FINERY_ATTEMPT_TOKEN", SECRET)
        sandbox = Sandbox(SOURCE, backend=backend, limits=Limits(tmp_files=400))

    def attempt(name: str) -> dict[str, Any]:
        if backend.alone and name in OF_AN_OWN_USER:
            pytest.skip("this backend is for ordinary users, who may not do it anyway")
        order = given | {"keeper": sandbox.pid, "in_place": backend.alone}
        reply: dict[str, Any] = json.loads(sandbox.ask(json.dumps([name, order]).encode(), 20.0))
        return reply

    yield attempt
    sandbox.stop()


@pytest.fixture(scope="module")
def unconfined(given: dict[str, Any]) -> Iterator[Try]:
    """Tries an attempt in an ordinary process of ours."""
    ours, theirs = os.pipe()
    folder = given["folder"] + "/tmp"
    os.makedirs(folder)
    process = subprocess.Popen(
        [backends.python(), "-I", "-S", "-c", SOURCE, str(theirs)],
        stdin=subprocess.PIPE,
        pass_fds=(theirs, given["victims_descriptor"]),
        env=os.environ | {"TMPDIR": folder, "FINERY_ATTEMPT_TOKEN": SECRET},
    )
    os.close(theirs)
    assert process.stdin is not None
    with process.stdin as orders, os.fdopen(ours, "rb") as replies:

        def attempt(name: str) -> dict[str, Any]:
            orders.write(json.dumps([name, given | {"outside": True}]).encode() + b"\n")
            orders.flush()
            reply: dict[str, Any] = json.loads(replies.readline())
            return reply

        yield attempt
    assert process.wait(20.0) == 0


def test_there_are_many_attempts() -> None:
    assert len(ATTEMPTS) >= 60


@pytest.mark.parametrize("name", ATTEMPTS)
def test_the_sandbox_stops(name: str, confined: Try) -> None:
    outcome = confined(name)
    assert not outcome["escaped"], outcome["met"]


@pytest.mark.parametrize("name", ATTEMPTS)
def test_without_the_sandbox_it_succeeds(name: str, unconfined: Try) -> None:
    """Else the test above could not fail."""
    outcome = unconfined(name)
    if name == "finds_what_an_earlier_program_left":
        outcome = unconfined(name)
    if not outcome["escaped"] and (outcome.get("unsupported") or not ROOT):
        pytest.skip(f"this machine or user cannot do it: {outcome['met']}")
    assert outcome["escaped"], outcome["met"]


def test_a_later_program_finds_no_files_of_an_earlier_one(given: dict[str, Any]) -> None:
    for backend in (KINDS["bubblewrap"], KINDS["landlock"]):
        for _ in range(2):
            sandbox = Sandbox(SOURCE, backend=backend)
            reply = json.loads(sandbox.ask(json.dumps(["finds_what_an_earlier_program_left", given]).encode(), 20.0))
            sandbox.stop()
            assert not reply["escaped"]
            assert backend.alone or reply["met"] == "False", "expected that it could write its own files"


def test_the_probe_finds_bubblewrap_here_or_says_why_not() -> None:
    assert backends.choose().kind in backends.KINDS
