"""A function in the sandbox: loaded once, called often, started anew when it was killed."""

from __future__ import annotations

import json
import math
import os
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from finery_gpu_workers.sandbox.limits import Limits, SandboxUnavailable
from finery_gpu_workers.sandbox.process import Ended, OutOfMemory, Sandbox, TimeIsOver

_HARNESS = Path(__file__).with_name("harness.py")
_LOAD_SECONDS = 60.0
_CPU_SECONDS_MORE = 2
_MOST_SECONDS = 1e9


class LoadError(Exception):
    """The function could not be loaded; the message is what its author needs to know."""


class Lost(Exception):  # noqa: N818 - a state
    """The process was killed, and so was the one that was started in its place."""


@dataclass(frozen=True)
class Reply:
    """Exactly one of `value` and `failed` is there."""

    value: Any = None
    failed: str | None = None
    timed_out: bool = False
    printed: str = ""
    cpu_seconds: float = 0.0


class Function:
    """`setup` says what is loaded (harness.py). Starts no process before it is needed. For one thread, but for
    `interrupt`."""

    def __init__(
        self,
        setup: Mapping[str, Any],
        *,
        limits: Limits | None = None,
        read: Sequence[str] = (),
        load_seconds: float | None = None,
    ) -> None:
        self._setup, self._limits, self._read = dict(setup), limits or Limits(), read
        self._load_seconds = load_seconds or _LOAD_SECONDS
        self._sandbox: Sandbox | None = None
        self._interrupted = False
        self._count = 0
        self._used = math.inf
        """CPU seconds of the process up to its last reply; loading is not counted."""

    def start(self) -> None:
        """Raises LoadError, SandboxUnavailable."""
        try:
            self._open()
        except Ended as error:
            self._dropped()
            raise LoadError(f"loading it failed: {error}") from None

    def _open(self) -> None:
        if self._sandbox is not None:
            return
        self._sandbox = Sandbox(_HARNESS.read_text("utf-8"), limits=self._limits, read=self._read)
        self._used = math.inf
        if self._interrupted:
            self._sandbox.interrupt()
        setup = self._setup | {"forks": not self._sandbox.backend.alone}
        try:
            answer = _object(self._sandbox.ask(json.dumps(setup).encode(), self._load_seconds))
        except TimeIsOver:
            self._sandbox = None
            raise LoadError(f"loading took longer than {self._load_seconds:g} s") from None
        if "failed" in answer:
            self.close()
            raise LoadError(_text(answer, "failed", 4000))
        self._used = _seconds(answer, "total")

    def call(self, payload: Mapping[str, Any], seconds: float) -> Reply:
        """The reply, at the latest `seconds` after the function was there to be called and a little for killing it.

        Raises Lost, LoadError. No sandbox is Lost too: `start` says whether there can be one, so that the machine is
        short of something for now.
        """
        for _ in range(2):
            try:
                self._open()
                return self._call(payload, seconds)
            except Ended as error:
                why, used = str(error), self._dropped()
                if self._interrupted:
                    break
                if isinstance(error, OutOfMemory):
                    return Reply(failed=f"the grader was ended: {why}", cpu_seconds=used)
            except SandboxUnavailable as error:
                self._dropped()
                why = error.message
        raise Lost(why)

    def _call(self, payload: Mapping[str, Any], seconds: float) -> Reply:
        assert self._sandbox is not None
        sandbox, self._count, began = self._sandbox, self._count + 1, time.monotonic()
        cpu_seconds = math.ceil(seconds) + _CPU_SECONDS_MORE
        request = {"n": self._count, "payload": payload, "cpu_seconds": cpu_seconds}
        try:
            answer = _object(sandbox.ask(json.dumps(request).encode(), seconds))
        except TimeIsOver as error:
            return Reply(failed=str(error), timed_out=True, cpu_seconds=self._dropped())
        self._used = _seconds(answer, "total")
        if sandbox.backend.alone or answer.get("over") is not False or answer.get("n") != self._count:
            self.close()
        if answer.get("n") != self._count:
            raise Ended("its answer belongs to no question")
        if answer.get("killed"):
            self.close()
            raise Ended("its process was killed")
        return _reply(answer, most_seconds=(time.monotonic() - began) * (os.cpu_count() or 1) + 1)

    def _dropped(self) -> float:
        """CPU seconds since its last reply, of a process that has ended or is ended now."""
        sandbox, self._sandbox = self._sandbox, None
        return 0.0 if sandbox is None else max(0.0, sandbox.stop().cpu_seconds - self._used)

    def interrupt(self) -> None:
        """Ends what runs, from another thread; the function is not to be called again."""
        self._interrupted = True
        if self._sandbox is not None:
            self._sandbox.interrupt()

    def close(self) -> None:
        if self._sandbox is not None:
            self._sandbox.stop()
            self._sandbox = None


def showable(text: str, length: int) -> str:
    """As UTF-8 and PostgreSQL can hold it: without halves of characters and without NUL."""
    return text[:length].encode("utf-8", "replace").decode().replace("\0", "\N{REPLACEMENT CHARACTER}")


def _object(line: bytes) -> dict[str, Any]:
    """What the harness said. Code that ran beside it may have broken it, so nothing about it is believed."""
    try:
        value = json.loads(line)
    except (ValueError, RecursionError):
        return {}
    return value if isinstance(value, dict) else {}


def _reply(answer: Mapping[str, Any], most_seconds: float) -> Reply:
    seconds, printed = min(_seconds(answer, "cpu"), most_seconds), _text(answer, "printed", 2000)
    if "value" in answer:
        return Reply(value=answer["value"], printed=printed, cpu_seconds=seconds)
    return Reply(failed=_text(answer, "failed", 4000) or "no answer", printed=printed, cpu_seconds=seconds)


def _seconds(answer: Mapping[str, Any], name: str) -> float:
    """0 where it is no number of seconds."""
    value = answer.get(name)
    return float(value) if isinstance(value, int | float) and 0 <= value < _MOST_SECONDS else 0.0


def _text(answer: Mapping[str, Any], name: str, length: int) -> str:
    value = answer.get(name)
    return showable(value, length) if isinstance(value, str) else ""
