from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import httpx
import pytest

from finery import JobFailedError, WaitTimeoutError

from .support import (
    BOTH,
    KEY,
    Client,
    Handler,
    Seen,
    Time,
    client_of,
    event_json,
    job_json,
    mocked,
    serving,
    sse,
    value,
)

EVENTS = [event_json(seq) for seq in range(1, 4)]


def streaming(state: str, events: bytes, **job: Any) -> Callable[[Handler, Seen], None]:
    def reply(handler: Handler, seen: Seen) -> None:
        if "/events" in seen.path:
            handler.stream()
            handler.wfile.write(events)
        else:
            handler.json(200, job_json(state=state, **job))

    return reply


async def test_wait_gives_the_ended_job_and_every_event_once(kind: Client) -> None:
    heard: list[int] = []
    with serving(streaming("succeeded", sse(*EVENTS[:3], done=True))) as server:
        job = await value(client_of(kind, server).jobs.wait("job_1", on_event=lambda event: heard.append(event.seq)))
    assert (job.state, heard) == ("succeeded", [1, 2, 3])


async def test_wait_awaits_an_async_listener() -> None:
    heard: list[int] = []

    async def listen(event: Any) -> None:
        heard.append(event.seq)

    with serving(streaming("succeeded", sse(*EVENTS[:2], done=True))) as server:
        await client_of(BOTH[1], server).jobs.wait("job_1", on_event=listen)
    assert heard == [1, 2]


@pytest.mark.parametrize("state", ["failed", "cancelled"])
async def test_wait_raises_the_job_that_did_not_succeed(kind: Client, state: str) -> None:
    error = {"message": "Line 3 is empty.", "type": "invalid_request_error", "code": "invalid_data"}
    with serving(streaming(state, sse(EVENTS[0], done=True), error=error)) as server:
        client = client_of(kind, server)
        with pytest.raises(JobFailedError) as caught:
            await value(client.jobs.wait("job_1"))
        assert str(caught.value) == f"Job job_1 ended {state} (invalid_data): Line 3 is empty."
        assert caught.value.job.state == state
        assert (await value(client.jobs.wait("job_1", raise_on_failure=False))).state == state


async def test_wait_stops_at_its_timeout_though_heartbeats_come(kind: Client) -> None:
    time = Time()

    def beats() -> Iterator[bytes]:
        while True:
            time.now += 15
            yield b": heartbeat\n\n"

    class Beating(httpx.SyncByteStream, httpx.AsyncByteStream):
        def __iter__(self) -> Iterator[bytes]:
            return beats()

        async def __aiter__(self) -> Any:
            for beat in beats():
                yield beat

    def handler(request: httpx.Request) -> httpx.Response:
        return httpx.Response(200, headers={"content-type": "text/event-stream"}, stream=Beating())

    with pytest.raises(WaitTimeoutError, match=r"did not end within 100 s"):
        await value(mocked(kind, handler, time).jobs.wait("job_1", timeout=100))
    assert time.now == 105


async def test_wait_stops_at_its_timeout_though_nothing_comes(kind: Client) -> None:
    """Real clock: the server sends one event and then falls silent."""

    def reply(handler: Handler, seen: Seen) -> None:
        handler.stream()
        handler.wfile.write(sse(EVENTS[0]))
        handler.rfile.read(1)  # until the client hangs up

    with serving(reply) as server:
        client: Any = kind(KEY, server.url)
        with pytest.raises(TimeoutError, match="did not end within"):
            await value(client.jobs.wait("job_1", timeout=0.3))
        await value(client.close())


async def test_the_timeout_says_that_a_paused_job_does_not_go_on(kind: Client) -> None:
    def reply(handler: Handler, seen: Seen) -> None:
        handler.stream()
        handler.wfile.write(sse(event_json(1, "state", to="paused")))
        handler.rfile.read(1)  # until the client hangs up

    with serving(reply) as server:
        client: Any = kind(KEY, server.url)
        with pytest.raises(WaitTimeoutError, match=r"it is paused\. Let it go on with jobs\.resume\('job_1'\)"):
            await value(client.jobs.wait("job_1", timeout=0.3))
        await value(client.close())


async def test_wait_bears_a_server_that_restarts_just_at_the_end(kind: Client) -> None:
    def reply(handler: Handler, seen: Seen) -> None:
        if "/events" in seen.path:
            handler.stream()
            handler.wfile.write(sse(EVENTS[0], done=True))
        elif len(server.to("/v1/jobs/job_1")) < 9:
            handler.cut()
        else:
            handler.json(200, job_json(state="succeeded"))

    with serving(reply) as server:
        assert (await value(client_of(kind, server).jobs.wait("job_1"))).state == "succeeded"
        assert len([seen for seen in server.seen if "/events" in seen.path]) == 1


async def test_a_job_that_rests_is_waited_for_behind_its_last_event(kind: Client) -> None:
    states = iter(["paused", "succeeded"])

    def reply(handler: Handler, seen: Seen) -> None:
        if "/events" in seen.path:
            after = int(seen.headers["last-event-id"])
            handler.stream()
            handler.wfile.write(sse(EVENTS[after], done=True))
        else:
            handler.json(200, job_json(state=next(states)))

    heard: list[int] = []
    with serving(reply) as server:
        await value(client_of(kind, server).jobs.wait("job_1", on_event=lambda event: heard.append(event.seq)))
    assert heard == [1, 2]
