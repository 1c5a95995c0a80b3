"""The local Ray head of `up`: its command line, and a broom for what a killed head left behind.

This module only starts a program; it imports nothing of Ray.
"""

from __future__ import annotations

import contextlib
import hashlib
import json
import os
import shutil
import signal
import sys
import tempfile
from pathlib import Path

_LONGEST_FOLDER = 40
"""Ray puts unix sockets up to 66 characters deeper; the kernel's limit is 107."""


def folder(home: Path) -> Path:
    """Ray's folder: in the home, or under the temporary folder when that path is too long for unix sockets."""
    inside = home / "ray"
    if len(str(inside)) > _LONGEST_FOLDER:
        digest = hashlib.sha256(str(home).encode()).hexdigest()[:12]
        inside = Path(tempfile.gettempdir()) / f"finery-ray-{os.geteuid()}-{digest}"
    inside.mkdir(mode=0o700, parents=True, exist_ok=True)
    if inside.stat().st_uid != os.geteuid():
        raise PermissionError(f"{inside} belongs to uid {inside.stat().st_uid}: expected it to be ours")
    return inside


def command(port: int, client_port: int, slots: int, ray_folder: Path) -> list[str]:
    """Everything on loopback, no dashboard. `worker_slot` is the resource that a worker on this node holds."""
    ray = str(Path(sys.executable).parent / "ray")
    return [
        *(ray, "start", "--head", "--block", "--disable-usage-stats"),
        *("--node-ip-address=127.0.0.1", f"--port={port}", f"--ray-client-server-port={client_port}"),
        *("--min-worker-port=0", "--max-worker-port=0"),
        *("--include-dashboard=false", "--include-log-monitor=false", f"--object-store-memory={128 * 2**20}"),
        *(f"--resources={json.dumps({'worker_slot': slots})}", f"--temp-dir={_temporary(ray_folder)}"),
    ]


def environment(base: dict[str, str], token: str) -> dict[str, str]:
    """`base` plus what every process that talks to this Ray needs; loopback only."""
    return base | {
        "RAY_AUTH_MODE": "token",
        "RAY_AUTH_TOKEN": token,
        "RAY_ENABLE_WINDOWS_OR_OSX_CLUSTER": "0",
        # On SIGTERM stop at once: the workers resume from their checkpoints, whatever the drain would wait for.
        "RAY_GRACEFUL_SHUTDOWN_DRAIN_TIMEOUT_S": "0",
    }


def working_folder(ray_folder: Path) -> Path:
    """The head's working directory, which its processes inherit: how `sweep` knows them."""
    path = ray_folder / "head"
    path.mkdir(mode=0o700, exist_ok=True)
    return path


def _temporary(ray_folder: Path) -> Path:
    return ray_folder / "t"  # Ray opens its folder to everybody; ours around it stays closed


def sweep(ray_folder: Path) -> None:
    """Kill what an earlier head of this folder left behind (agents outlive a killed head) and remove its sessions.

    Call it while no head of this folder runs. Only processes that run our Python or Ray's programs *in the head's
    own working directory* are ours.
    """
    mark = working_folder(ray_folder).resolve()
    python = Path(sys.executable).resolve()
    for entry in Path("/proc").glob("[0-9]*") if sys.platform == "linux" else ():
        with contextlib.suppress(OSError):
            program = (entry / "exe").resolve(strict=True)
            ours = program == python or f"{os.sep}ray{os.sep}core{os.sep}" in str(program)
            if ours and (entry / "cwd").resolve(strict=True) == mark and int(entry.name) != os.getpid():
                os.kill(int(entry.name), signal.SIGKILL)
    for session in _temporary(ray_folder).glob("session_*"):
        if not session.is_symlink():
            shutil.rmtree(session, ignore_errors=True)
