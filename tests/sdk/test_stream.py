from __future__ import annotations

import json
from typing import Any

import pytest

from finery import (
    APIConnectionError,
    APIError,
    EventGapError,
    Finery,
    FineryError,
    NotFoundError,
)

from .support import (
    KEY,
    Client,
    Handler,
    HttpServer,
    Seen,
    Time,
    client_of,
    error_json,
    event_json,
    items,
    page_json,
    serving,
    sse,
    value,
)

EVENTS = [event_json(seq) for seq in range(1, 601)]


def last_id(seen: Seen) -> int:
    return int(seen.headers.get("last-event-id", 0))


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


@pytest.mark.parametrize("end", ["\n", "\r", "\r\n"])
async def test_e08_line_separators_and_emoji_in_an_event_arrive_as_sent(kind: Client, end: str) -> None:
    sent = event_json(1, "warning", message="a\u2028b\x85c 🔥 \r\n", n=1)
    lines = ["event: warning", f"data: {json.dumps(sent, ensure_ascii=False)}", "", "event: done", "data: {}", "", ""]
    stream = end.join(lines).encode()

    def reply(handler: Handler, seen: Seen) -> None:
        handler.stream()
        for n in range(len(stream)):
            handler.wfile.write(stream[n : n + 1])
            handler.wfile.flush()

    with serving(reply) as server:
        (event,) = await items(client_of(kind, server).jobs.stream("job_1"))
    assert event.data == sent["data"]
    assert "\ufffd" not in event.model_dump_json()


async def test_e08_the_list_of_events_is_utf_8_though_no_charset_says_so(kind: Client) -> None:
    sent = event_json(1, "warning", message="a\u2028b\x85c 🔥 \r\n", n=1)

    def reply(handler: Handler, seen: Seen) -> None:
        handler.whole(200, json.dumps(page_json([sent]), ensure_ascii=False).encode(), **{"Content-Type": "text/plain"})

    with serving(reply) as server:
        (event,) = await value(client_of(kind, server).jobs.events("job_1"))
    assert event.data == sent["data"]
