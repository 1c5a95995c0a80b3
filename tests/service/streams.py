"""Jobs with events, and listeners to their streams over a real socket."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import Any

import httpx
import uvicorn

from finery.types.jobs import JobState
from finery.types.reasons import JobReason
from finery_service.db.engine import transaction
from finery_service.jobs import store
from finery_testing import factories
from finery_testing.api import Api, Door

SSE = {"accept": "text/event-stream"}


async def append(api: Api, door: Door, job: str, count: int = 1, **data: Any) -> None:
    async with transaction(api.system_engine) as session:
        events: Any = [("metric", {"step": n, **data}) for n in range(count)]
        await store.append_events(session, tenant=door.tenant.id, job=job, events=events, now=api.clock())


async def end(api: Api, job: str) -> None:
    async with transaction(api.system_engine) as session:
        reason = JobReason.COMPLETED
        assert await store.move(session, job, to=JobState.SUCCEEDED, reason=reason, now=api.clock())


async def running_job(api: Api, door: Door) -> str:
    job = await factories.job(api.system_engine, door.tenant, now=api.clock(), state="running")
    return job.id


async def blocks(answer: httpx.Response) -> AsyncIterator[dict[str, str]]:
    """Events and comments of a stream, as the standard has them."""
    text = ""
    async for chunk in answer.aiter_text():
        text += chunk
        while "\n\n" in text:
            block, text = text.split("\n\n", 1)
            yield dict(line.split(": ", 1) for line in block.split("\n"))


@asynccontextmanager
async def served(api: Api) -> AsyncIterator[tuple[str, uvicorn.Server]]:
    """The API behind a real socket: the in-process transport hands over answers only when they are complete."""
    config = uvicorn.Config(api.app, port=0, log_config=None, lifespan="off", timeout_graceful_shutdown=5)
    server = uvicorn.Server(config)
    task = asyncio.create_task(server.serve())
    await eventually(lambda: server.started, "the server listens")
    port = server.servers[0].sockets[0].getsockname()[1]
    try:
        yield f"http://127.0.0.1:{port}", server
    finally:
        server.should_exit = True
        await task


@asynccontextmanager
async def listening(url: str, door: Door, job: str, after: int = 0) -> AsyncIterator[AsyncIterator[dict[str, str]]]:
    headers = {**SSE, "authorization": door.client.headers["authorization"]}
    async with (
        httpx.AsyncClient(trust_env=False, timeout=20) as client,
        client.stream("GET", f"{url}/v1/jobs/{job}/events?after={after}", headers=headers) as answer,
    ):
        assert answer.status_code == 200
        yield blocks(answer)


async def next_event(stream: AsyncIterator[dict[str, str]]) -> dict[str, str]:
    async with asyncio.timeout(10):
        async for block in stream:
            if "event" in block:
                return block
    raise AssertionError("the stream ended")


async def eventually(condition: Any, what: str) -> None:
    async with asyncio.timeout(10):
        while not condition():  # noqa: ASYNC110 others make it come true, and tell nobody
            await asyncio.sleep(0.02)
    assert condition(), what
