from __future__ import annotations

import json
from collections.abc import Callable, Iterator
from typing import Any

import httpx
import pytest

from finery import (
    APIConnectionError,
    APIError,
    EventGapError,
    Finery,
    FineryError,
    JobFailedError,
    NotFoundError,
    WaitTimeoutError,
)

from .support import (
    BOTH,
    KEY,
    Client,
    Handler,
    HttpServer,
    Seen,
    Time,
    error_json,
    event_json,
    items,
    job_json,
    mocked,
    serving,
    sse,
    value,
)

EVENTS = [event_json(seq) for seq in range(1, 601)]


def last_id(seen: Seen) -> int:
    return int(seen.headers.get("last-event-id", 0))


@pytest.fixture(params=BOTH)
def kind(request: pytest.FixtureRequest) -> Client:
    kind: Client = request.param
    return kind


def client_of(kind: Client, server: HttpServer, time: Time | None = None, **options: Any) -> Any:
    return kind(KEY, server.url, runtime=(time or Time()).runtime(), **options)


async def seqs(client: Any, after: int = 0) -> list[int]:
    return [event.seq for event in await items(client.jobs.stream("job_1", after=after))]


async def test_e06_a_cut_stream_goes_on_where_it_was_cut(kind: Client) -> None:
    def reply(handler: Handler, seen: Seen) -> None:
        after = last_id(seen)
        handler.stream()
        if after == 0:
            handler.wfile.write(sse(*EVENTS[:250]) + sse(EVENTS[250])[:40])  # in the middle of an event
        else:
            handler.wfile.write(sse(*EVENTS[after:], done=True))

    with serving(reply) as server:
        assert await seqs(client_of(kind, server)) == list(range(1, 601))
        assert [last_id(seen) for seen in server.seen] == [0, 250]
        assert all(seen.headers["accept"] == "text/event-stream" for seen in server.seen)


async def test_e06_a_server_that_repeats_is_heard_once(kind: Client) -> None:
    def reply(handler: Handler, seen: Seen) -> None:
        handler.stream()
        known = 100 if len(server.seen) < 2 else 600
        handler.wfile.write(sse(*EVENTS[:known], done=known == 600))

    with serving(reply) as server:
        assert await seqs(client_of(kind, server)) == list(range(1, 601))


async def test_e06_another_server_process_on_the_same_port_goes_on(kind: Client) -> None:
    """Connection refused in between: the second server starts while the client waits for its third try."""

    def first(handler: Handler, seen: Seen) -> None:
        handler.stream()
        handler.wfile.write(sse(*EVENTS[:250]))

    def second(handler: Handler, seen: Seen) -> None:
        handler.stream()
        handler.wfile.write(sse(*EVENTS[last_id(seen) :], done=True))

    server, others, time = HttpServer(first), [], Time()
    port = server.server_address[1]

    def restart() -> None:
        if len(time.slept) == 1:
            server.stop()
        elif len(time.slept) == 3:
            others.append(HttpServer(second, port))

    time.on_sleep = restart
    try:
        assert await seqs(client_of(kind, server, time)) == list(range(1, 601))
        assert [last_id(seen) for seen in others[0].seen] == [250]
    finally:
        for other in others:
            other.stop()


async def test_e06_forgotten_history_is_an_error_not_silence(kind: Client) -> None:
    def reply(handler: Handler, seen: Seen) -> None:
        handler.stream()
        handler.wfile.write(b'event: gap\ndata: {"oldest": 500}\n\n')

    with serving(reply) as server, pytest.raises(EventGapError, match=r"no longer has the events after 3.*500"):
        await seqs(client_of(kind, server), after=3)


async def test_a_hole_in_the_history_is_an_error(kind: Client) -> None:
    def reply(handler: Handler, seen: Seen) -> None:
        handler.stream()
        handler.wfile.write(sse(EVENTS[0], EVENTS[1], EVENTS[4]))

    with serving(reply) as server, pytest.raises(EventGapError, match="expected event 3, found 5"):
        await seqs(client_of(kind, server))


async def test_a_stream_ends_at_done_and_not_before_its_last_event(kind: Client) -> None:
    def reply(handler: Handler, seen: Seen) -> None:
        handler.head(200, **{"Content-Type": "text/event-stream; charset=utf-8", "Content-Length": "1000000"})
        handler.wfile.write(
            b"retry: 1000\n\n" + sse(*EVENTS[:3]) + b": heartbeat\n\n" + sse(done=True) + sse(EVENTS[3])
        )
        handler.close_connection = True

    with serving(reply) as server:
        assert await seqs(client_of(kind, server)) == [1, 2, 3]
        assert len(server.seen) == 1


@pytest.mark.parametrize("status", [429, 500, 502, 503, 504])
async def test_a_server_that_is_busy_or_away_is_tried_again(kind: Client, status: int) -> None:
    def reply(handler: Handler, seen: Seen) -> None:
        if len(server.seen) < 9:  # more often than a plain call is
            handler.json(status, error_json("busy"), retry_after="7")
        else:
            handler.stream()
            handler.wfile.write(sse(EVENTS[0], done=True))

    time = Time()
    with serving(reply) as server:
        assert await seqs(client_of(kind, server, time)) == [1]
    assert time.slept == [7.0] * 8


async def test_a_refusal_ends_the_stream_at_once(kind: Client) -> None:
    def reply(handler: Handler, seen: Seen) -> None:
        handler.json(404, error_json("job_not_found"))

    with serving(reply) as server:
        with pytest.raises(NotFoundError):
            await seqs(client_of(kind, server))
        assert len(server.seen) == 1


async def test_a_page_of_a_proxy_is_no_stream(kind: Client) -> None:
    def reply(handler: Handler, seen: Seen) -> None:
        handler.whole(200, b"<html>", **{"Content-Type": "text/html"})

    with serving(reply) as server, pytest.raises(FineryError, match="found text/html"):
        await seqs(client_of(kind, server))


@pytest.mark.parametrize("data", [b"not json", b"{}"])
async def test_what_is_no_event_is_shown(kind: Client, data: bytes) -> None:
    def reply(handler: Handler, seen: Seen) -> None:
        handler.stream()
        handler.wfile.write(b"event: metric\ndata: " + data + b"\n\n")

    with serving(reply) as server, pytest.raises(FineryError, match="expected an event after 0, found 'metric' with"):
        await seqs(client_of(kind, server))


async def test_a_server_that_stays_away_is_given_up_after_the_reconnect_timeout(kind: Client) -> None:
    time = Time()
    with serving(lambda handler, seen: handler.cut()) as server:
        client = client_of(kind, server, time, reconnect_timeout=30.0)
        with pytest.raises(APIConnectionError):
            await seqs(client)
    assert 30 <= time.now < 36
    assert max(time.slept) == 5.0
    assert time.slept[:3] == [0.5, 1.0, 2.0]


async def test_a_server_that_only_ever_ends_the_stream_is_given_up_too(kind: Client) -> None:
    time = Time()
    with serving(lambda handler, seen: handler.stream()) as server, pytest.raises(APIError, match="kept ending"):
        await seqs(client_of(kind, server, time, reconnect_timeout=10.0))


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
            after = last_id(seen)
            handler.stream()
            handler.wfile.write(sse(EVENTS[after], done=True))
        else:
            handler.json(200, job_json(state=next(states)))

    heard: list[int] = []
    with serving(reply) as server:
        await value(client_of(kind, server).jobs.wait("job_1", on_event=lambda event: heard.append(event.seq)))
    assert heard == [1, 2]


def test_a_stream_that_is_left_hangs_up() -> None:
    hung_up: list[bytes] = []

    def reply(handler: Handler, seen: Seen) -> None:
        handler.stream()
        handler.wfile.write(sse(EVENTS[0]))
        hung_up.append(handler.rfile.read(1))

    with serving(reply) as server, Finery(KEY, server.url) as client:
        stream = client.jobs.stream("job_1")
        assert next(stream).seq == 1
        stream.close()
        server.stop()
    assert hung_up == [b""]


async def test_e08_line_separators_and_emoji_in_an_event_arrive_as_sent(kind: Client) -> None:
    sent = event_json(1, "warning", message="a\u2028b\x85c 🔥 \r\n", n=1)
    stream = f"event: warning\r\ndata: {json.dumps(sent, ensure_ascii=False)}\r\n\r\n".encode() + sse(done=True)

    def reply(handler: Handler, seen: Seen) -> None:
        handler.stream()
        for n in range(len(stream)):
            handler.wfile.write(stream[n : n + 1])
            handler.wfile.flush()

    with serving(reply) as server:
        (event,) = await items(client_of(kind, server).jobs.stream("job_1"))
    assert event.data == sent["data"]
