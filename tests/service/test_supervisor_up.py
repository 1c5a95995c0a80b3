"""`finery-service up` with all its real processes: readiness, restarts, kill -9 of itself, a clean stop."""

from __future__ import annotations

import json
import os
import shutil
import signal
import socket
import stat
import subprocess
import sys
import tempfile
import time
import urllib.request
from collections.abc import Iterator
from pathlib import Path

import psutil
import pytest

from finery_service import ray_head
from finery_service.home import is_free
from finery_testing.stack import Stack

pytestmark = pytest.mark.e2e
JUDGES_KEY = "sk-of-the-judge"
CHILDREN = ("postgres", "ray", "api", "rpc", "reconcile")


@pytest.fixture(scope="module")
def stack() -> Iterator[Stack]:
    folder = Path(tempfile.mkdtemp(prefix="finery-up-", dir="/tmp"))
    folder.chmod(0o755)  # as root, PostgreSQL runs as an unprivileged user and must reach its data
    stack = Stack(folder / "home", slots=3)
    try:
        with pytest.MonkeyPatch.context() as patch:
            patch.setenv("FINERY_SCORE_MODELS", f'{{"https://judge.example/v1": "{JUDGES_KEY}"}}')
            stack.start()
            yield stack
    finally:
        if stack.process is not None and stack.process.poll() is None:
            stack.process.kill()
        shutil.rmtree(folder, ignore_errors=True)


def status(stack: Stack, path: str, key: str = "") -> int:
    request = urllib.request.Request(stack.state["base_url"] + path, headers={"Authorization": f"Bearer {key}"})
    try:
        with urllib.request.build_opener(urllib.request.ProxyHandler({})).open(request, timeout=5) as response:
            return int(response.status)
    except urllib.error.HTTPError as error:
        return error.code
    except OSError:
        return 0


def processes(stack: Stack) -> list[psutil.Process]:
    """All descendants of `up`, and whatever stands in the folder of its Ray head."""
    assert stack.process is not None
    found = {process.pid: process for process in psutil.Process(stack.process.pid).children(recursive=True)}
    mark = str(ray_head.working_folder(ray_head.folder(stack.home)))
    for process in psutil.process_iter():
        try:
            if process.cwd() == mark:
                found[process.pid] = process
        except psutil.Error:
            continue
    return list(found.values())


def gone(process: psutil.Process) -> bool:
    try:
        return not process.is_running() or process.status() == psutil.STATUS_ZOMBIE
    except psutil.NoSuchProcess:
        return True


def test_ready_means_that_every_process_does_its_work(stack: Stack) -> None:
    assert set(stack.state) == {"ready", "up", "pids", "base_url", "rpc_address", "ray_address"}
    assert set(stack.state["pids"]) == set(CHILDREN)
    assert all(psutil.pid_exists(pid) for pid in stack.state["pids"].values())
    assert status(stack, "/readyz") == 200
    assert status(stack, "/v1/jobs", stack.api_key) == 200
    assert status(stack, "/v1/jobs", stack.api_key + "x") == 401
    operator_key = (stack.home / "operator.key").read_text().strip()
    assert status(stack, "/v1/tenants", operator_key) == 200


def test_secrets_are_in_private_files_and_nowhere_else(stack: Stack) -> None:
    secrets = [*json.loads((stack.home / "secrets.json").read_text()).values()]
    secrets += [JUDGES_KEY, *((stack.home / name).read_text().strip() for name in ("operator.key", "tenant.key"))]
    for name in ("secrets.json", "operator.key", "tenant.key", "state.json"):
        assert stat.S_IMODE((stack.home / name).stat().st_mode) == 0o600, name
    shown = [stack.home / "state.json", stack.home.parent / "up.log", *(stack.home / "logs").iterdir()]
    texts = [path.read_text(errors="replace") for path in shown]
    texts += [" ".join(process.cmdline()) for process in processes(stack)]
    assert len(texts) > 12
    assert [text[:200] for text in texts if any(secret in text for secret in secrets)] == []


def test_each_process_holds_only_the_secrets_that_it_needs(stack: Stack) -> None:
    allowed = {
        "postgres": set(),
        "ray": {"RAY_AUTH_TOKEN"},
        "api": {"FINERY_APP_DSN", "FINERY_SYSTEM_DSN", "FINERY_SCORE_MODELS"},
        "rpc": {"FINERY_SYSTEM_DSN", "FINERY_WORKER_SECRET"},
        "reconcile": {"FINERY_SYSTEM_DSN", "FINERY_WORKER_SECRET", "FINERY_RAY_TOKEN", "FINERY_SCORE_MODELS"},
    }
    secret = {"FINERY_OWNER_DSN", *(name for names in allowed.values() for name in names)}
    for child, names in allowed.items():
        assert secret & set(psutil.Process(stack.state["pids"][child]).environ()) == names, child


def test_everything_listens_on_loopback_only(stack: Stack) -> None:
    listening = {
        connection.laddr.ip
        for process in processes(stack)
        for connection in process.net_connections("tcp")
        if connection.status == psutil.CONN_LISTEN
    }
    assert listening <= {"127.0.0.1", "::ffff:127.0.0.1", "::1"}
    assert listening


def test_a_second_up_on_the_same_home_is_refused(stack: Stack) -> None:
    command = [str(Path(sys.executable).parent / "finery-service"), "up", "--home", str(stack.home), "--port", "0"]
    result = subprocess.run(command, capture_output=True, text=True, timeout=30, check=False)
    assert result.returncode == 1
    assert f"already uses {stack.home}" in result.stderr
    assert stack.state["ready"] is True


@pytest.mark.parametrize("name", CHILDREN)
def test_a_child_killed_with_9_comes_back_and_the_api_answers_again(stack: Stack, name: str) -> None:
    killed = stack.kill(name)
    start = time.monotonic()
    stack.until(lambda: stack.state["pids"][name] not in (None, killed), 20, f"{name} is started again")
    if name in ("api", "rpc", "reconcile"):
        assert time.monotonic() - start < 3
    stack.until(lambda: status(stack, "/readyz") == 200, 30, "the API is ready again")
    stack.until(lambda: status(stack, "/v1/jobs", stack.api_key) == 200, 30, "the database answers again")


def test_up_killed_with_9_takes_all_along_and_the_next_one_finds_everything(stack: Stack) -> None:
    before, key = processes(stack), stack.api_key
    agents = [process for process in before if process.name().startswith("ray::")]
    stack.kill_up()
    rest = [process for process in before if process not in agents]
    stack.until(lambda: all(gone(process) for process in rest), 20, "all processes of the killed one are gone")
    stack.start()
    assert stack.api_key == key, "the tenant and its key are reused"
    assert status(stack, "/v1/jobs", key) == 200
    assert [agent for agent in agents if not gone(agent)] == [], "Ray's agents outlive a killed head; they are swept up"


def test_sigterm_stops_all_in_order_with_status_0(stack: Stack) -> None:
    before, ports = processes(stack), json.loads((stack.home / "ports.json").read_text())
    started = time.monotonic()
    assert stack.stop() == 0
    assert time.monotonic() - started < 30
    assert [process for process in before if not gone(process)] == []
    assert stack.state["ready"] is False
    assert set(stack.state["pids"].values()) == {None}
    assert all(is_free(port) for port in ports.values())
    assert (stack.home.parent / "up.log").read_text().rstrip().endswith("Finery stopped")


def test_a_port_in_use_is_a_clear_error_and_leaves_nothing_running(stack: Stack) -> None:
    """The stack is stopped by now; something else listens on its API port."""
    with socket.socket() as other:
        other.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        other.bind(("127.0.0.1", stack.port))
        other.listen()
        with pytest.raises(AssertionError, match=rf"(?s)exited with 1.*Port {stack.port} on 127\.0\.0\.1 is in use"):
            stack.start(timeout=60)
    assert stack.process is not None
    assert stack.process.returncode == 1
    assert set(stack.state["pids"].values()) <= {None}


def test_sigint_while_it_starts_stops_it(stack: Stack) -> None:
    command = [str(Path(sys.executable).parent / "finery-service"), "up", "--home", str(stack.home), "--port", "0"]
    process = subprocess.Popen(command, stdout=subprocess.PIPE, text=True, start_new_session=True)
    stack.until(lambda: stack.state["up"] == process.pid and "postgres" in stack.state["pids"], 30, "it is starting")
    os.kill(process.pid, signal.SIGINT)
    output, _ = process.communicate(timeout=40)
    assert process.returncode == 0
    assert output.rstrip().endswith("Finery stopped")
    assert set(stack.state["pids"].values()) <= {None}
