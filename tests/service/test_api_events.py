from __future__ import annotations

import asyncio
import json
from collections.abc import AsyncIterator
from contextlib import suppress
from typing import Any

import httpx
import pytest

from finery_testing.api import Api, Door

from .streams import SSE, append, end, eventually, listening, next_event, running_job, served


async def whole(door: Door, job: str, **headers: str) -> list[dict[str, str]]:
    """The stream of a job that has ended."""
    answer = await door.get(f"/v1/jobs/{job}/events", headers={**SSE, **headers})
    assert answer.status_code == 200, answer.text
    return [dict(line.split(": ", 1) for line in block.split("\n")) for block in answer.text.split("\n\n") if block]


def seqs(found: list[dict[str, str]]) -> list[int]:
    return [int(block["id"]) for block in found if "id" in block]


async def test_list_pages_by_seq(api: Api) -> None:
    door = await api.tenant()
    job = await running_job(api, door)
    await append(api, door, job, 5)
    first = (await door.get(f"/v1/jobs/{job}/events?limit=3")).json()
    second = (await door.get(f"/v1/jobs/{job}/events?limit=3&after={first['last_id']}")).json()
    assert [event["seq"] for event in first["data"]] == [1, 2, 3]
    assert [event["seq"] for event in second["data"]] == [4, 5]
    assert (first["has_more"], second["has_more"]) == (True, False)
    assert (await door.get(f"/v1/jobs/{job}/events?after=5")).json()["data"] == []


async def test_stream_of_an_ended_job_is_its_history_and_done(api: Api) -> None:
    door = await api.tenant()
    job = await running_job(api, door)
    await append(api, door, job, 3)
    await end(api, job)
    answer = await door.get(f"/v1/jobs/{job}/events", headers=SSE)
    assert answer.headers["content-type"] == "text/event-stream; charset=utf-8"
    assert "no-cache" in answer.headers["cache-control"]
    found = await whole(door, job)
    listed = (await door.get(f"/v1/jobs/{job}/events")).json()["data"]
    assert [json.loads(block["data"]) for block in found if "id" in block] == listed
    assert seqs(found) == [1, 2, 3, 4]
    assert [block["event"] for block in found if "event" in block] == ["metric"] * 3 + ["state", "done"]
    assert found[-1] == {"event": "done", "data": "{}"}


async def test_e06_reconnect_goes_on_after_the_last_id(api: Api) -> None:
    door = await api.tenant()
    job = await running_job(api, door)
    await append(api, door, job, 599)
    await end(api, job)
    rest = seqs(await whole(door, job, **{"last-event-id": "250"}))
    assert rest == list(range(251, 601))
    answer = await door.get(f"/v1/jobs/{job}/events?after=10", headers={**SSE, "last-event-id": "599"})
    assert answer.text.count("\nevent: ") == 1 + 1, "the header wins over the address, which is of the first connection"
    assert seqs(await whole(door, job, **{"last-event-id": "600"})) == []
    assert (await whole(door, job, **{"last-event-id": "600"}))[-1]["event"] == "done"


@pytest.mark.parametrize("cursor", ["7", "99999999999", "-1", "x", "1.5", "9" * 30, "٣"])
async def test_e06_cursor_that_is_no_event_is_refused_before_the_200(api: Api, cursor: str) -> None:
    door = await api.tenant()
    job = await running_job(api, door)
    await append(api, door, job, 6)
    headers: Any = [(b"accept", b"text/event-stream"), (b"last-event-id", cursor.encode())]
    answer = await door.client.get(f"/v1/jobs/{job}/events", headers=headers)
    assert (answer.status_code, answer.json()["error"]["code"]) == (400, "invalid_cursor")


async def test_stream_is_authorised_before_the_200(api: Api) -> None:
    door, stranger = await api.tenant(), await api.tenant()
    job = await running_job(api, door)
    assert (await stranger.get(f"/v1/jobs/{job}/events", headers=SSE)).status_code == 404
    assert (await api.client.get(f"/v1/jobs/{job}/events", headers=SSE)).status_code == 401


async def test_e08_line_separators_are_escaped_and_arrive_whole(api: Api) -> None:
    door = await api.tenant()
    job = await running_job(api, door)
    text = "a\u2028b\u2029c\u0085d\re\nf😀"
    await append(api, door, job, 1, text=text)
    await end(api, job)
    answer = await door.get(f"/v1/jobs/{job}/events", headers=SSE)
    for separator in ("\u2028", "\u2029", "\u0085", "\r"):
        assert separator not in answer.text
    found = await whole(door, job)
    assert json.loads(found[1]["data"])["data"]["text"] == text


async def test_a29_answers_are_strict_json(api: Api) -> None:
    door = await api.tenant()
    job = await running_job(api, door)
    await append(api, door, job, 1, loss=None, non_finite={"loss": "NaN"})
    answer = await door.get(f"/v1/jobs/{job}/events")
    event = json.loads(answer.text, parse_constant=lambda word: pytest.fail(word))["data"][0]
    assert (event["data"]["loss"], event["data"]["non_finite"]) == (None, {"loss": "NaN"})


async def test_live_stream_delivers_beats_and_ends_with_done(api: Api) -> None:
    door = await api.tenant()
    job = await running_job(api, door)
    async with served(api) as (url, _), listening(url, door, job) as stream:
        async with asyncio.timeout(10):
            heartbeats = [block async for block in _until_comment(stream)]
        assert heartbeats, "an idle stream shows that it lives"
        await append(api, door, job, 2)
        assert [(await next_event(stream))["id"] for _ in range(2)] == ["1", "2"]
        await end(api, job)
        assert json.loads((await next_event(stream))["data"])["data"]["to"] == "succeeded"
        assert (await next_event(stream))["event"] == "done"
        assert [block async for block in stream] == [], "and closes"


async def _until_comment(stream: AsyncIterator[dict[str, str]]) -> AsyncIterator[dict[str, str]]:
    async for block in stream:
        if "" in block:
            yield block
            return


async def test_many_streams_get_every_event_once_through_one_poller(api: Api, monkeypatch: pytest.MonkeyPatch) -> None:
    door = await api.tenant()
    jobs = [await running_job(api, door) for _ in range(2)]
    feeds = api.app.state.services.feeds
    looks, look = 0, feeds._look

    async def counted() -> None:
        nonlocal looks
        looks += 1
        await look()

    monkeypatch.setattr(feeds, "_look", counted)

    async def follow(url: str, job: str, after: int) -> list[int]:
        found = []
        async with listening(url, door, job, after) as stream:
            while (event := await next_event(stream))["event"] != "done":
                found.append(int(event["id"]))
        return found

    async def write(job: str) -> None:
        for _ in range(20):
            await append(api, door, job, 5)
            await asyncio.sleep(0.01)
        await end(api, job)

    await append(api, door, jobs[0], 700)  # more than a feed keeps
    async with served(api) as (url, _):
        start = asyncio.get_running_loop().time()
        followers = [follow(url, job, 0) for job in jobs for _ in range(5)]
        results = await asyncio.gather(*followers, follow(url, jobs[0], 300), *(write(job) for job in jobs))
        seconds = asyncio.get_running_loop().time() - start
    assert results[:5] == [list(range(1, 802))] * 5
    assert results[5:10] == [list(range(1, 102))] * 5
    assert results[10] == list(range(301, 802))
    assert looks <= seconds / 0.15 + 2, "one query per interval, however many streams"
    assert api.app.state.services.metrics.streams._value.get() == 0
    assert feeds._feeds == {}, "nothing is kept of streams that ended"


async def test_idle_stream_holds_no_connection(api: Api) -> None:
    door = await api.tenant()
    job = await running_job(api, door)
    pool: Any = api.app.state.services.app_engine.pool
    async with served(api) as (url, _):
        async with listening(url, door, job) as stream:
            await append(api, door, job)
            await next_event(stream)
            assert pool.checkedout() == 0
        await eventually(lambda: api.app.state.services.feeds._feeds == {}, "a client that left is forgotten")


async def test_stream_survives_a_database_that_is_away(own_api: Api, monkeypatch: pytest.MonkeyPatch) -> None:
    door = await own_api.tenant()
    job = await running_job(own_api, door)
    feeds = own_api.app.state.services.feeds
    look, failures = feeds._look, 0

    async def failing() -> None:
        nonlocal failures
        failures += 1
        if failures <= 1:
            raise OSError("connection refused")
        await look()

    async with served(own_api) as (url, _), listening(url, door, job) as stream:
        monkeypatch.setattr(feeds, "_look", failing)
        await append(own_api, door, job)
        assert (await next_event(stream))["id"] == "1"
    assert failures > 1


@pytest.mark.parametrize("busy", [True, False])
async def test_a_stream_ends_soon_after_its_key_was_revoked(api: Api, busy: bool) -> None:
    """Within three heartbeats, with events or without: 30 s by default."""
    door = await api.tenant()
    job = await running_job(api, door)
    async with served(api) as (url, _), listening(url, door, job) as stream:
        await append(api, door, job)
        assert (await next_event(stream))["id"] == "1"
        operator = await api.operator()
        keys = (await operator.get(f"/v1/tenants/{door.tenant.id}/keys")).json()["data"]
        assert (await operator.delete(f"/v1/tenants/{door.tenant.id}/keys/{keys[0]['id']}")).status_code == 200
        events = asyncio.create_task(_append_on(api, door, job)) if busy else None
        async with asyncio.timeout(10):
            rest = [block async for block in stream if "event" in block]
        if events is not None:
            events.cancel()
    assert "done" not in [block["event"] for block in rest], "it is not over: it is no longer his"
    assert (await door.get(f"/v1/jobs/{job}/events", headers=SSE)).status_code == 401


async def _append_on(api: Api, door: Door, job: str) -> None:
    while True:
        await append(api, door, job)
        await asyncio.sleep(0.02)


async def test_a_stream_outlives_a_database_that_cannot_tell_of_its_key(
    own_api: Api, monkeypatch: pytest.MonkeyPatch
) -> None:
    door = await own_api.tenant()
    job = await running_job(own_api, door)
    asked = 0

    async def away(*_: object) -> bool:
        nonlocal asked
        asked += 1
        raise OSError("connection refused")

    async with served(own_api) as (url, _), listening(url, door, job) as stream:
        monkeypatch.setattr("finery_service.keys.store.is_live", away)
        await eventually(lambda: asked > 0, "the key was looked up")
        await append(own_api, door, job)
        assert (await next_event(stream))["id"] == "1"


async def test_stopping_ends_the_streams_without_done(own_api: Api) -> None:
    door = await own_api.tenant()
    job = await running_job(own_api, door)
    async with served(own_api) as (url, server), listening(url, door, job) as stream:
        await append(own_api, door, job)
        await next_event(stream)
        server.should_exit = True
        await own_api.app.state.services.feeds.close()
        async with asyncio.timeout(5):
            with suppress(httpx.RemoteProtocolError):
                assert [block async for block in stream if "event" in block] == []
