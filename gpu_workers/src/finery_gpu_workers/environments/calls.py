"""A function in the sandbox: loaded once, called often, started anew when it was killed."""

from __future__ import annotations

import json
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from finery_gpu_workers.sandbox.limits import Limits
from finery_gpu_workers.sandbox.process import Ended, Sandbox, TimeIsOver

_HARNESS = Path(__file__).with_name("harness.py")
_LOAD_SECONDS = 60.0
_CPU_SECONDS_MORE = 2


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
        self._count, self._used = 0, 0.0

    def start(self) -> None:
        """Raises LoadError, SandboxUnavailable."""
        try:
            self._open()
        except Ended as error:
            raise LoadError(f"loading it failed: {error}") from None

    def _open(self) -> None:
        if self._sandbox is not None:
            return
        self._sandbox = Sandbox(_HARNESS.read_text("utf-8"), limits=self._limits, read=self._read)
        self._used = 0.0
        if self._interrupted:
            self._sandbox.interrupt()
        setup = self._setup | {"forks": not self._sandbox.backend.alone}
        try:
            answer = _object(self._sandbox.ask(json.dumps(setup).encode(), self._load_seconds))
        except TimeIsOver:
            self._sandbox = None
            raise LoadError(f"loading took longer than {self._load_seconds:g} s") from None
        except Ended:
            self._sandbox = None
            raise
        if "failed" in answer:
            self.close()
            raise LoadError(showable(str(answer["failed"]), 4000))

    def call(self, payload: Mapping[str, Any], seconds: float) -> Reply:
        """The reply, at the latest `seconds` after the function was there to be called and a little for killing it.

        Raises Lost, LoadError, SandboxUnavailable.
        """
        for _ in range(2):
            try:
                self._open()
                return self._call(payload, seconds)
            except Ended as error:
                why = str(error)
                if self._interrupted:
                    break
                if "memory" in why:
                    return Reply(failed=f"the grader was ended: {why}")
        raise Lost(why)

    def _call(self, payload: Mapping[str, Any], seconds: float) -> Reply:
        assert self._sandbox is not None
        sandbox, self._count = self._sandbox, self._count + 1
        cpu_seconds = math.ceil(seconds) + _CPU_SECONDS_MORE
        request = {"n": self._count, "payload": payload, "cpu_seconds": cpu_seconds}
        try:
            answer = _object(sandbox.ask(json.dumps(request).encode(), seconds))
        except TimeIsOver as error:
            self._sandbox = None
            used = max(0.0, sandbox.stop().cpu_seconds - self._used)
            return Reply(failed=str(error), timed_out=True, cpu_seconds=used)
        except Ended:
            self._sandbox = None
            raise
        if sandbox.backend.alone or answer.get("over") is not False or answer.get("n") != self._count:
            self.close()
        if answer.get("n") != self._count:
            raise Ended("its answer belongs to no question")
        if answer.get("killed"):
            self.close()
            raise Ended("its process was killed")
        reply = _reply(answer)
        self._used += reply.cpu_seconds
        return reply

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


def _reply(answer: Mapping[str, Any]) -> Reply:
    cpu, printed = answer.get("cpu"), answer.get("printed")
    seconds = float(cpu) if isinstance(cpu, int | float) and math.isfinite(cpu) and cpu >= 0 else 0.0
    text = showable(printed, 2000) if isinstance(printed, str) else ""
    if "value" in answer:
        return Reply(value=answer["value"], printed=text, cpu_seconds=seconds)
    return Reply(failed=showable(str(answer.get("failed", "no answer")), 4000), printed=text, cpu_seconds=seconds)
