"""`finery-service up` as a child process: the whole system, real processes, real PostgreSQL, real Ray."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

from finery import Finery
from finery_service.home import free_port


class Stack:
    """One home folder and, while it runs, the `up` process that owns it."""

    def __init__(self, home: Path, *, slots: int = 1, tenant: str = "e2e", torch_threads: int | None = 1) -> None:
        """`torch_threads` per worker; None leaves the service its default."""
        self.home = home
        self.slots = slots
        self.tenant = tenant
        self.threads = {} if torch_threads is None else {"FINERY_TORCH_THREADS": str(torch_threads)}
        self.port = free_port()  # the same over restarts, as a deployment's is
        self.process: subprocess.Popen[bytes] | None = None

    def start(self, timeout: float = 120) -> None:
        """Start `up` and return once it serves."""
        log = (self.home.parent / "up.log").open("ab")
        state = self.home / "state.json"
        before = state.read_bytes() if state.exists() else b""
        command = [str(Path(sys.executable).parent / "finery-service"), "up", "--home", str(self.home)]
        command += ["--port", str(self.port), "--slots", str(self.slots), "--tenant", self.tenant]
        environment = {**os.environ, **self.threads}
        self.process = subprocess.Popen(command, stdout=log, stderr=log, env=environment, start_new_session=True)

        def ready() -> bool:
            assert self.process is not None
            if self.process.poll() is not None:
                tail = (self.home.parent / "up.log").read_text(errors="replace")[-4000:]
                raise AssertionError(f"`finery-service up` exited with {self.process.returncode}:\n{tail}")
            if not state.exists() or state.read_bytes() == before or not (self.home / "tenant.key").exists():
                return False
            return self.state.get("ready") is True

        self.until(ready, timeout, "the stack is ready")

    @property
    def state(self) -> dict[str, Any]:
        content: dict[str, Any] = json.loads((self.home / "state.json").read_text())
        return content

    @property
    def api_key(self) -> str:
        return (self.home / "tenant.key").read_text().strip()

    def client(self, api_key: str | None = None) -> Finery:
        return Finery(base_url=self.state["base_url"], api_key=api_key or self.api_key)

    def operator(self) -> Finery:
        return self.client((self.home / "operator.key").read_text().strip())

    def environment(self) -> dict[str, str]:
        return {**os.environ, "FINERY_BASE_URL": self.state["base_url"], "FINERY_API_KEY": self.api_key}

    def kill(self, name: str) -> int:
        """kill -9 one of the children by its name in state.json; the pid that died."""
        pid = int(self.state["pids"][name])
        os.kill(pid, signal.SIGKILL)
        return pid

    def kill_up(self) -> None:
        assert self.process is not None
        self.process.kill()
        self.process.wait()

    def stop(self) -> int:
        """SIGTERM; the exit code."""
        if self.process is None or self.process.poll() is not None:
            return 0 if self.process is None else self.process.returncode
        self.process.send_signal(signal.SIGTERM)
        try:
            return self.process.wait(60)
        except subprocess.TimeoutExpired:
            self.process.kill()
            raise AssertionError("`finery-service up` did not stop within 60 s of SIGTERM") from None

    @staticmethod
    def until(condition: Callable[[], bool], timeout: float, what: str) -> None:
        """Wait for a condition of another process; it is an error if it does not come true."""
        deadline = time.monotonic() + timeout
        while not condition():
            if time.monotonic() > deadline:
                raise AssertionError(f"not within {timeout} s: {what}")
            time.sleep(0.05)
