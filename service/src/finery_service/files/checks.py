"""How the pieces of an upload are checked: lines as they come in, parquet at the end, in a process of its own.

The child has no environment, a limit on its memory, a deadline, and dies with us. What it reads is a file without a
name, so that nothing is left of it whoever is killed.
"""

from __future__ import annotations

import asyncio
import os
import signal
import sys
import tempfile
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from typing import IO, Protocol

import structlog
from pydantic import TypeAdapter

from finery.data.check import Report, RowCheck
from finery.data.parquet import is_parquet
from finery.types.errors import Problem
from finery_service.db.embedded import dies_with_us
from finery_service.files import child

_AT_ONCE = asyncio.Semaphore(2)
_MAX_REPORT_BYTES = 4 * 2**20
# What libraries reserve without using it counts against the limit on its memory.
_ENVIRONMENT = {"MALLOC_ARENA_MAX": "2", "ARROW_DEFAULT_MEMORY_POOL": "system"}
_WRITE_ANEW = "Write the file anew with smaller pages and row groups, or as JSONL."
_REPORT = TypeAdapter(Report)

log = structlog.get_logger("finery.files")


@dataclass(frozen=True)
class Limits:
    """Seconds that a child may take: `start` and what the file's size allows at `bytes_per_second`."""

    start: float = 120.0
    bytes_per_second: float = 500_000.0


class Check(Protocol):
    async def feed(self, piece: bytes) -> None: ...

    async def finish(self) -> Report: ...


@asynccontextmanager
async def checking(limits: Limits) -> AsyncIterator[Check]:
    """A check that takes every kind of file: what it is, its first piece (of at least four bytes) decides."""
    check = _AnyCheck(limits)
    try:
        yield check
    finally:
        if check.spool is not None:
            check.spool.close()


@dataclass
class _AnyCheck:
    limits: Limits
    lines: RowCheck = field(default_factory=RowCheck)
    spool: IO[bytes] | None = None
    """Of parquet: the file so far."""
    size: int = 0

    async def feed(self, piece: bytes) -> None:
        if self.size == 0 and is_parquet(piece):
            self.spool = tempfile.TemporaryFile(buffering=0)  # noqa: SIM115 (`checking` closes it)
        self.size += len(piece)
        # In a thread: parsing a megabyte of rows would stop every other request.
        await asyncio.to_thread(self.lines.feed if self.spool is None else self._write, piece)

    def _write(self, piece: bytes) -> None:
        assert self.spool is not None
        rest = memoryview(piece)
        while rest:
            rest = rest[self.spool.write(rest) :]

    async def finish(self) -> Report:
        if self.spool is None:
            return await asyncio.to_thread(self.lines.finish)
        async with _AT_ONCE:
            return await check_apart(self.spool, self.size, self.limits)


@dataclass(frozen=True)
class _Ended:
    code: int
    output: bytes = field(repr=False)


async def check_apart(file: IO[bytes], size: int, limits: Limits) -> Report:
    """The report of a parquet file. If the child does not come to an end, that is a problem of the file."""
    seconds = limits.start + size / limits.bytes_per_second
    try:
        async with asyncio.timeout(seconds):
            ended = await _run(file)
    except TimeoutError:
        message = f"expected a file whose rows are checked in {seconds:.0f} s, found one that takes longer"
        return _refused("parquet_too_slow", message, "Split the file, or upload it as JSONL.")
    if ended.code == 0:
        return _REPORT.validate_json(ended.output)
    if ended.code == child.TOO_LITTLE_MEMORY:
        message = f"expected pages and rows that can be read with {child.MEMORY_BYTES} bytes, found larger ones"
        return _refused("parquet_too_large", message, _WRITE_ANEW)
    if ended.code < 0:
        log.warning("parquet_check_died", signal=-ended.code, size=size)
        message = f"expected a parquet file, found one that cannot be read: its reader died of signal {-ended.code}"
        return _refused("invalid_parquet", message, _WRITE_ANEW)
    raise RuntimeError(f"the check of a parquet file ended with {ended.code}")


async def _run(file: IO[bytes]) -> _Ended:
    command = dies_with_us([sys.executable, "-I", "-B", "-m", child.__name__], signal.SIGKILL)
    process = await asyncio.create_subprocess_exec(
        *command,
        stdin=file,
        stdout=asyncio.subprocess.PIPE,
        stderr=asyncio.subprocess.DEVNULL,
        env=_ENVIRONMENT,
        cwd=os.sep,
    )
    assert process.stdout is not None
    try:
        output = bytearray()
        while len(output) <= _MAX_REPORT_BYTES and (part := await process.stdout.read(2**16)):
            output += part
        if len(output) > _MAX_REPORT_BYTES:
            raise RuntimeError(f"the check of a parquet file wrote more than {_MAX_REPORT_BYTES} bytes")
        return _Ended(await process.wait(), bytes(output))
    finally:
        if process.returncode is None:
            process.kill()
            await process.wait()


def _refused(code: str, message: str, hint: str) -> Report:
    problem = Problem(code=code, message=message, hint=hint)
    return Report("invalid", None, "parquet", 0, (problem,), 1)
