"""Entrypoints for backend tests. Each writes what it saw into the folder `OUT` of its environment."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import threading
from pathlib import Path

CHILD = "import signal, time; signal.signal(signal.SIGTERM, signal.SIG_IGN); print('up', flush=True); time.sleep(600)"


def _note(environment: dict[str, str], name: str, value: object) -> None:
    folder = Path(environment["OUT"])
    partial = folder / f".{name}-{os.getpid()}"
    partial.write_text(json.dumps(value))
    partial.rename(folder / f"{name}-{os.getpid()}.json")


def stays(environment: dict[str, str]) -> None:
    """Report the environment and stay."""
    _note(environment, "stays", {"pid": os.getpid(), "environment": environment, "os": dict(os.environ)})
    threading.Event().wait()


def ends(environment: dict[str, str]) -> None:
    _note(environment, "ends", os.getpid())


def raises(environment: dict[str, str]) -> None:
    _note(environment, "raises", os.getpid())
    raise RuntimeError("the entrypoint failed")


def has_children(environment: dict[str, str]) -> None:
    """Two children that ignore SIGTERM, one of them in a session of its own, and one with a cleared environment."""
    children = [
        subprocess.Popen([sys.executable, "-c", CHILD], stdout=subprocess.PIPE, start_new_session=True),
        subprocess.Popen([sys.executable, "-c", CHILD], stdout=subprocess.PIPE),
        subprocess.Popen([sys.executable, "-c", CHILD], stdout=subprocess.PIPE, env={}),
    ]
    for child in children:
        assert child.stdout is not None
        child.stdout.readline()
    _note(environment, "children", {"pid": os.getpid(), "children": [child.pid for child in children]})
    threading.Event().wait()


not_callable = 7
