"""A Ray head of the tests' own: free ports, loopback, token; stopped by SIGTERM to its process."""

from __future__ import annotations

import os
import secrets
import signal
import subprocess
import sys
import time
from dataclasses import dataclass
from pathlib import Path

from finery_service.home import free_port

SLOTS = 4


@dataclass(frozen=True)
class Head:
    address: str
    token: str
    folder: Path
    process: subprocess.Popen[bytes]


def start_head(folder: Path, port: int | None = None, token: str | None = None) -> Head:
    """Start a head with `SLOTS` worker slots; its sockets lie in `folder`, so that path must be short."""
    port, token = port or free_port(), token or secrets.token_hex(32)
    options = {
        "--node-ip-address": "127.0.0.1",
        "--port": port,
        "--num-cpus": 1,
        "--resources": f'{{"worker_slot": {SLOTS}}}',
        "--include-dashboard": "false",
        "--include-log-monitor": "false",
        "--object-store-memory": 80_000_000,
        "--temp-dir": folder,
        "--min-worker-port": 0,
        "--max-worker-port": 0,
        "--ray-client-server-port": free_port(),
        "--dashboard-agent-listen-port": free_port(),
    }
    environment = {
        **os.environ,
        "RAY_AUTH_MODE": "token",
        "RAY_AUTH_TOKEN": token,
        "RAY_ENABLE_WINDOWS_OR_OSX_CLUSTER": "0",
        "RAY_USAGE_STATS_ENABLED": "0",
    }
    with (folder / "head.log").open("wb") as log:
        process = subprocess.Popen(
            [
                str(Path(sys.executable).with_name("ray")),
                *("start", "--head", "--block", "--disable-usage-stats"),
                *(str(part) for option in options.items() for part in option),
            ],
            env=environment,
            stdout=log,
            stderr=log,
        )
    _until_started(process, folder / "head.log")
    return Head(f"127.0.0.1:{port}", token, folder, process)


def _until_started(process: subprocess.Popen[bytes], log: Path) -> None:
    deadline = time.monotonic() + 60
    while b"Ray runtime started" not in log.read_bytes():
        assert process.poll() is None, log.read_text()
        assert time.monotonic() < deadline, "the Ray head did not start within 60 s"
        time.sleep(0.1)


def stop_head(head: Head) -> None:
    head.process.send_signal(signal.SIGTERM)
    head.process.wait(timeout=30)
