"""One attempt's entrypoint in a process of its own, on the accelerator's side. Imports neither Ray nor the service."""

from __future__ import annotations

import importlib
import json
import os
import sys
import threading
import traceback
from collections.abc import Callable

MARK = "FINERY_WORKER_OF"
"""Environment variable with the attempt id, set before the worker's process starts: it and all it starts carry it."""

Entrypoint = Callable[[dict[str, str]], object]


def resolve(entrypoint: str) -> Entrypoint:
    """The callable behind `package.module:callable`.

    Raises ValueError that says which part of the name is wrong; its text never holds an environment.
    """
    module, _, name = entrypoint.partition(":")
    if not module or not name:
        raise ValueError(f"entrypoint {entrypoint!r}: expected 'package.module:callable'")
    try:
        found = getattr(importlib.import_module(module), name)
    except Exception as error:
        raise ValueError(f"entrypoint {entrypoint!r} cannot be loaded: {type(error).__name__}: {error}") from error
    if not callable(found):
        raise ValueError(f"entrypoint {entrypoint!r} is a {type(found).__name__}, not a callable")
    return found  # type: ignore[no-any-return]


def run_and_exit(entrypoint: Entrypoint, environment: dict[str, str]) -> None:
    """Run to the end, then leave at once: a worker whose entrypoint is over must not look alive."""
    code = 0
    try:
        entrypoint(environment)
    except SystemExit as stop:
        code = stop.code if isinstance(stop.code, int) else 0 if stop.code is None else 1
    except BaseException:
        traceback.print_exc()
        code = 1
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(code)


class Worker:
    """The actor of one attempt (`ray_driver` makes it one): a thread runs the entrypoint, its end ends the process."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._started = False

    def start(self, entrypoint: str, environment: dict[str, str]) -> str | None:
        """Start once; later calls change nothing. Returns what is wrong with the entrypoint, or None."""
        with self._lock:
            if self._started:
                return None
            os.environ.pop("RAY_AUTH_TOKEN", None)  # this process read it long ago; what it starts must not have it
            try:
                target = resolve(entrypoint)
            except ValueError as error:
                return str(error)
            threading.Thread(target=run_and_exit, args=(target, dict(environment)), name="entrypoint").start()
            self._started = True
            return None


def main() -> None:
    """The `inline` backend's child: one JSON request on stdin, one line of reply on stdout, then the entrypoint."""
    request = json.loads(sys.stdin.readline())
    with os.fdopen(os.dup(1), "w") as reply:
        os.dup2(2, 1)
        error = None
        try:
            target = resolve(request["entrypoint"])
        except ValueError as found:
            error = str(found)
        print(json.dumps(error), file=reply)
    if error is None:
        run_and_exit(target, request["environment"])


if __name__ == "__main__":
    main()
