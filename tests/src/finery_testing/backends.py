"""What tests of backends share: attempts to launch, and waiting for what their workers noted (`workers.py`)."""

from __future__ import annotations

import asyncio
import json
import time
import uuid
from collections.abc import Awaitable, Callable
from pathlib import Path
from typing import Any

from finery_scheduler.backend import Backend, Launch
from finery_scheduler.core.types import Placement

SECRET = "s3cret-attempt-token"


def attempt_id() -> str:
    return f"att_{uuid.uuid4().hex}"


async def stop_all(pool: Backend) -> None:
    for attempt in await pool.workers():
        await pool.stop(attempt)


async def an_attempt(pool: Backend, out: Path, entrypoint: str = "stays", slots: int = 1) -> Launch:
    node = (await pool.nodes())[0].id
    return Launch(
        attempt=attempt_id(),
        entrypoint=f"finery_testing.workers:{entrypoint}",
        environment={"OUT": str(out), "FINERY_ATTEMPT_TOKEN": SECRET},
        placements=(Placement(node, slots),) if slots else (),
    )


async def until(condition: Callable[[], Awaitable[Any]], seconds: float = 30) -> Any:
    deadline = time.monotonic() + seconds
    while not (value := await condition()):
        assert time.monotonic() < deadline, f"not within {seconds} s"
        await asyncio.sleep(0.05)
    return value


def notes(out: Path, name: str) -> list[Any]:
    return [json.loads(path.read_text()) for path in out.glob(f"{name}-*.json")]


async def noted(out: Path, name: str) -> Any:
    async def read() -> list[Any]:
        return notes(out, name)

    (note,) = await until(read)
    return note


async def status(pool: Backend, attempt: str, expected: str) -> None:
    async def is_so() -> bool:
        return (await pool.workers()).get(attempt) == expected

    await until(is_so)
