"""Regular expressions of customers are compiled where they can be killed: in a process with a deadline."""

from __future__ import annotations

import asyncio
import sys

from finery_service.errors import ServiceError

SECONDS = 5.0
_AT_ONCE = asyncio.Semaphore(4)
_CHILD = """
import re, resource, sys
resource.setrlimit(resource.RLIMIT_CPU, (2, 2))
try:
    re.compile(sys.stdin.buffer.read().decode())
except (re.error, RecursionError, OverflowError, ValueError) as error:
    sys.stdout.write(str(error) or type(error).__name__)
"""


async def check(pattern: str, param: str) -> None:
    """Raises 400 for what Python's `re` does not take, or not within two CPU seconds.

    How long it searches is the workers' concern: they bound every call.
    """
    try:
        async with _AT_ONCE, asyncio.timeout(SECONDS):
            code, said = await _compile(pattern)
    except TimeoutError:
        code, said = -1, ""
    if code == 0 and not said:
        return
    found = said[:200] if code == 0 else "one that takes too long to compile"
    message = f"{param}: expected a regular expression as Python's re takes it, found {found}."
    raise ServiceError(400, "invalid_regex", message, param=param)


async def _compile(pattern: str) -> tuple[int, str]:
    process = await asyncio.create_subprocess_exec(
        *(sys.executable, "-I", "-S", "-B", "-W", "ignore", "-c", _CHILD),
        stdin=asyncio.subprocess.PIPE,
        stdout=asyncio.subprocess.PIPE,
        stderr=asyncio.subprocess.DEVNULL,
        env={},
    )
    try:
        said, _ = await process.communicate(pattern.encode())
        return await process.wait(), said.decode(errors="replace")
    finally:
        if process.returncode is None:
            process.kill()
            await process.wait()
