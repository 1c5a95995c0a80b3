"""Children that are started again whenever they end, until they are told to stop."""

from __future__ import annotations

import asyncio
import contextlib
import os
import signal
import time
from collections.abc import Awaitable, Callable
from dataclasses import dataclass, field
from pathlib import Path

from finery_service.db.embedded import EmbeddedError, User, dies_with_us

_FIRST_DELAY, _LONGEST_DELAY = 0.2, 10.0
_STEADY_SECONDS = 10.0
"""A child that ran this long starts again without the delay that its earlier deaths had earned."""
_LOG_BYTES = 64 * 2**20


class SupervisorError(Exception):
    """A child does not come up; the message says which, and shows the end of its log."""


async def _nothing() -> None:
    return None


@dataclass(frozen=True)
class Child:
    """What to run. `environment` holds secrets and stays out of the repr; nothing secret is in `command`."""

    name: str
    command: list[str]
    environment: dict[str, str] = field(repr=False)
    log: Path
    user: User | None = None
    folder: Path | None = None
    """Working directory."""
    stop_signal: signal.Signals = signal.SIGTERM
    stop_seconds: float = 10.0
    """How long it may take to stop before it is killed."""
    death_signal: signal.Signals = signal.SIGKILL
    """What the kernel sends it when we die."""
    before: Callable[[], Awaitable[None]] = _nothing
    """Runs before every start."""


class Keeper:
    """Keeps one child alive. `changed(name, pid)` hears of every start, and of every end with pid None."""

    def __init__(self, child: Child, *, changed: Callable[[str, int | None], None], say: Callable[[str], None]) -> None:
        self.child = child
        self.deaths = 0
        self._changed, self._say = changed, say
        self._process: asyncio.subprocess.Process | None = None
        self._stopping = asyncio.Event()
        self.task: asyncio.Task[None]

    def start(self) -> None:
        self.task = asyncio.create_task(self._keep(), name=self.child.name)

    async def stop(self) -> None:
        """Signal the child, wait for its end, kill it when it takes too long. Repeatable."""
        self._stopping.set()
        process = self._process
        if process is not None and process.returncode is None:
            with contextlib.suppress(ProcessLookupError):
                process.send_signal(self.child.stop_signal)
            try:
                await asyncio.wait_for(process.wait(), self.child.stop_seconds)
            except TimeoutError:
                self._say(f"{self.child.name} did not stop within {self.child.stop_seconds:g} s: killed")
                process.kill()
        await self.task

    def check(self) -> None:
        """Raise what ended the keeping, if anything did: a defect, since the death of a child does not."""
        if self.task.done():
            self.task.result()

    async def _keep(self) -> None:
        delay = _FIRST_DELAY
        while not self._stopping.is_set():
            started = time.monotonic()
            try:
                await self.child.before()
                ended = "" if self._stopping.is_set() else describe_exit(await self._run_once())
            except (EmbeddedError, OSError) as error:
                ended = f"could not start ({error})"
            if self._stopping.is_set():
                return
            self.deaths += 1
            if time.monotonic() - started >= _STEADY_SECONDS:
                delay = _FIRST_DELAY
            self._say(f"{self.child.name} {ended}; started again in {delay:g} s ({self.child.log})")
            with contextlib.suppress(TimeoutError):
                await asyncio.wait_for(self._stopping.wait(), delay)
            delay = min(2 * delay, _LONGEST_DELAY)

    async def _run_once(self) -> int:
        child = self.child
        rotate(child.log)
        command = dies_with_us(child.command, child.death_signal, child.user)
        with child.log.open("ab") as log:
            # A session of its own: a terminal's ctrl-C reaches us alone, and we stop them in order.
            process = await asyncio.create_subprocess_exec(
                *command,
                stdin=asyncio.subprocess.DEVNULL,
                stdout=log,
                stderr=log,
                env=child.environment,
                cwd=child.folder,
                start_new_session=True,
            )
        self._process = process
        self._changed(child.name, process.pid)
        if self._stopping.is_set():  # told to stop while it was being started
            process.send_signal(child.stop_signal)
        status = await process.wait()
        self._changed(child.name, None)
        return status


async def until(ready: Callable[[], Awaitable[bool]], keeper: Keeper, seconds: float) -> None:
    """Return once `ready()`; `SupervisorError` when the child died three times meanwhile or the time is over."""
    deadline = time.monotonic() + seconds
    deaths = keeper.deaths
    while not await ready():
        keeper.check()
        if keeper.deaths >= deaths + 3:
            raise SupervisorError(f"{keeper.child.name} ended three times while it started.{tail(keeper.child.log)}")
        if time.monotonic() > deadline:
            raise SupervisorError(f"{keeper.child.name} was not ready within {seconds:g} s.{tail(keeper.child.log)}")
        await asyncio.sleep(0.05)


async def run_to_end(child: Child, seconds: float) -> None:
    """Run a child that is to end by itself; `SupervisorError` when it fails or takes too long."""
    rotate(child.log)
    with child.log.open("ab") as log:
        process = await asyncio.create_subprocess_exec(
            *dies_with_us(child.command, child.death_signal, child.user),
            stdin=asyncio.subprocess.DEVNULL,
            stdout=log,
            stderr=log,
            env=child.environment,
            start_new_session=True,
        )
    try:
        status = await asyncio.wait_for(process.wait(), seconds)
    except TimeoutError:
        raise SupervisorError(f"{child.name} took longer than {seconds:g} s.{tail(child.log)}") from None
    finally:
        if process.returncode is None:
            process.kill()
            await process.wait()
    if status != 0:
        raise SupervisorError(f"{child.name} {describe_exit(status)}.{tail(child.log)}")


def describe_exit(status: int) -> str:
    return f"ended with status {status}" if status >= 0 else f"was ended by signal {-status}"


def tail(log: Path, lines: int = 15) -> str:
    """The end of a log, to put after a message."""
    try:
        with log.open("rb") as file:
            file.seek(max(0, os.fstat(file.fileno()).st_size - 8192))
            last = file.read().decode(errors="replace").splitlines()[-lines:]
    except OSError:
        last = []
    return "".join(f"\n    {line}" for line in (f"The end of {log}:", *last))


def rotate(log: Path) -> None:
    """One older generation is kept, so that logs do not fill the disk."""
    with contextlib.suppress(FileNotFoundError):
        if log.stat().st_size > _LOG_BYTES:
            log.replace(log.with_suffix(".log.1"))
