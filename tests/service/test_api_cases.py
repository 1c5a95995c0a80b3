"""Cases that need the API and a worker, or the API twice."""

from __future__ import annotations

import asyncio
import json
import re
from collections.abc import Iterator
from datetime import timedelta
from pathlib import Path
from typing import Any

import grpc
import httpx
import pytest
from sqlmodel.ext.asyncio.session import AsyncSession

from finery.types.jobs import JobState
from finery.types.reasons import JobReason
from finery_service.db.engine import transaction
from finery_service.jobs import store
from finery_testing import control, factories
from finery_testing.api import Api, Door, checkpoint, running_api
from finery_testing.control import SETTINGS, Worker, step

SSE = {"accept": "text/event-stream"}
TIME = re.compile(r"\d{4}-\d\d-\d\dT\d\d:\d\d:\d\d\.\d{6}Z")


def strict(text: str) -> Any:
    return json.loads(text, parse_constant=lambda word: pytest.fail(f"{word} is no JSON"))


async def running(api: Api, door: Door, **values: Any) -> tuple[str, Any]:
    """A job of four steps, and its attempt before Begin."""
    row = await factories.job(
        api.system_engine, door.tenant, now=api.clock(), state="starting", fence=1, total_steps=4, **values
    )
    return row.id, await factories.attempt(api.system_engine, row, now=api.clock(), state="starting")


async def test_a29_a_loss_that_is_no_number_is_null_and_named_in_every_answer(api: Api) -> None:
    door = await api.tenant()
    job, attempt = await running(api, door)
    async with control.rpc(api.system_engine, SETTINGS, api.clock) as channel:
        worker = Worker(channel, attempt)
        await worker.begin()
        odd = step(1, loss=float("nan"), evaluation=float("inf"))
        odd.metrics["grad_norm"] = float("-inf")
        await worker.commit(odd)
        error = {"message": "loss is NaN at step 1", "type": "invalid_request_error", "code": "non_finite_loss"}
        await worker.finish("non_finite_loss", json.dumps(error))
    for path in (f"/v1/jobs/{job}", "/v1/jobs", f"/v1/jobs/{job}/events", "/v1/usage?group_by=job", "/v1/checkpoints"):
        answer = await door.get(path)
        assert answer.status_code == 200, path
        strict(answer.text)
    assert (await api.client.get("/metrics")).status_code == 200
    stream = await door.get(f"/v1/jobs/{job}/events", headers=SSE)
    assert stream.status_code == 200
    lines = [line.removeprefix("data: ") for line in stream.text.split("\n") if line.startswith("data: ")]
    events = [strict(line) for line in lines]
    [metric] = [event["data"] for event in events if event.get("type") == "metric"]
    assert (metric["loss"], metric["grad_norm"]) == (None, None)
    assert metric["non_finite"] == {"loss": "NaN", "grad_norm": "-Infinity"}
    [evaluation] = [event["data"] for event in events if event.get("type") == "eval"]
    assert (evaluation["loss"], evaluation["non_finite"]) == (None, {"loss": "Infinity"})
    assert events[:-1] == strict((await door.get(f"/v1/jobs/{job}/events?limit=100")).text)["data"]


async def test_e18_times_are_utc_with_a_z_and_in_order_whatever_the_servers_clock_says(api: Api) -> None:
    door = await api.tenant()
    row = await factories.job(api.system_engine, door.tenant, now=api.clock(), state="starting")
    await checkpoint(api.system_engine, row, now=api.clock())
    behind = api.clock() - timedelta(seconds=120)
    for to, reason in ((JobState.RUNNING, None), (JobState.SUCCEEDED, JobReason.COMPLETED)):
        async with transaction(api.system_engine) as session:
            assert await store.move(session, row.id, to=to, reason=reason, now=behind)
    job = (await door.get(f"/v1/jobs/{row.id}")).json()
    assert job["created_at"] == job["started_at"] == job["finished_at"] == "2026-12-01T09:00:00.000000Z"
    answers = [job, (await door.get("/v1/checkpoints")).json(), (await door.get(f"/v1/jobs/{row.id}/events")).json()]
    answers += [(await door.get(path)).json() for path in ("/v1/files", "/v1/models")]
    times = [value for answer in answers for name, value in _leaves(answer) if name.endswith("_at") and value]
    assert len(times) >= 8
    assert [time for time in times if not TIME.fullmatch(time)] == []


def _leaves(value: Any, name: str = "") -> Iterator[tuple[str, Any]]:
    if isinstance(value, dict):
        for key, item in value.items():
            yield from _leaves(item, key)
    elif isinstance(value, list):
        for item in value:
            yield from _leaves(item, name)
    else:
        yield name, value


async def test_e19_a_job_whose_answer_was_lost_is_not_made_twice(api: Api) -> None:
    door = await api.tenant()
    body = {"method": "sft", "model": factories.MODEL_NAME, "training_file": await door.file_id()}
    headers = {**dict(door.client.headers), "idempotency-key": "k", "content-type": "application/json"}

    async def dropped(scope: Any, receive: Any, send: Any) -> None:
        async def gone(_message: Any) -> None:
            raise OSError("connection reset by peer")

        await api.app(scope, receive, gone)

    transport = httpx.ASGITransport(dropped, raise_app_exceptions=False)
    async with httpx.AsyncClient(transport=transport, base_url="http://finery.test", headers=headers) as client:
        for _ in range(2):
            assert (await client.post("/v1/jobs", json=body)).status_code == 500, "what the transport makes of it"
    answer = await door.client.post("/v1/jobs", json=body, headers={"idempotency-key": "k"})
    assert (answer.status_code, answer.headers["idempotent-replayed"]) == (201, "true")
    assert [job["id"] for job in (await door.get("/v1/jobs")).json()["data"]] == [answer.json()["id"]]


async def test_e06_a_cut_stream_goes_on_at_another_process_without_gap_or_repeat(api: Api, tmp_path: Path) -> None:
    door = await api.tenant()
    row = await factories.job(api.system_engine, door.tenant, now=api.clock(), state="running")
    async with transaction(api.system_engine) as session:
        metrics: Any = [("metric", {"step": n}) for n in range(600)]
        await store.append_events(session, tenant=row.tenant_id, job=row.id, events=metrics, now=api.clock())
    async with transaction(api.system_engine) as session:
        reason = JobReason.COMPLETED
        assert await store.move(session, row.id, to=JobState.SUCCEEDED, reason=reason, now=api.clock())
    path = f"/v1/jobs/{row.id}/events"
    first = (await door.get(path, headers=SSE)).text.split("\n\n")
    cut = [block for block in first if block.startswith("id: ")][:250]
    services = api.app.state.services
    async with running_api(services.app_engine, api.system_engine, tmp_path, api.clock) as other:
        client = other.with_key(door.client.headers["authorization"].split()[1])
        rest = (await client.get(path, headers={**SSE, "last-event-id": "250"})).text.split("\n\n")
    went_on = [block for block in rest if block.startswith("id: ")]
    assert went_on[0].startswith("id: 251\n")
    metrics_read = [block for block in cut + went_on if "event: metric" in block]
    ids = [int(block.split("\n")[0].removeprefix("id: ")) for block in metrics_read]
    assert ids == list(range(1, 601)), "600 distinct, 350 of them after the cut"
    assert went_on == [block for block in first if block.startswith("id: ")][250:], "the same bytes"


async def test_e05_an_event_that_commits_late_is_not_passed_over(api: Api) -> None:
    """Two writers: the second would be 2 and done first, but waits for the first, so no reader ever sees a hole."""
    door = await api.tenant()
    row = await factories.job(api.system_engine, door.tenant, now=api.clock(), state="running")

    async def append(session: AsyncSession, writer: int) -> None:
        event: Any = ("metric", {"writer": writer})
        await store.append_events(session, tenant=row.tenant_id, job=row.id, events=[event], now=api.clock())

    async def second() -> None:
        async with transaction(api.system_engine) as session:
            await append(session, 2)

    async def read(after: int) -> list[tuple[int, int]]:
        page = (await door.get(f"/v1/jobs/{row.id}/events?after={after}")).json()
        return [(event["seq"], event["data"]["writer"]) for event in page["data"]]

    async with transaction(api.system_engine) as session:
        await append(session, 1)
        late = asyncio.create_task(second())
        with pytest.raises(TimeoutError):
            await asyncio.wait_for(asyncio.shield(late), 0.5)
        assert await read(0) == []
    await late
    assert await read(0) == [(1, 1), (2, 2)]
    assert await read(1) == [(2, 2)]


async def test_e04_the_id_of_somebody_elses_object_is_no_cursor(api: Api) -> None:
    door, other = await api.tenant(), await api.tenant()
    theirs = await factories.job(api.system_engine, other.tenant, now=api.clock())
    preview = await factories.job(api.system_engine, door.tenant, now=api.clock(), kind="preview", state="validating")
    for after in (theirs.id, preview.id, theirs.training_file_id):
        answer = await door.get(f"/v1/jobs?after={after}")
        assert (answer.status_code, answer.json()["error"]["code"]) == (400, "invalid_cursor")


async def test_e10_nothing_is_metered_after_the_end(api: Api) -> None:
    door = await api.tenant()
    job, attempt = await running(api, door)
    async with control.rpc(api.system_engine, SETTINGS, api.clock) as channel:
        worker = Worker(channel, attempt)
        await worker.begin()
        await worker.commit(step(1), step(2))
        assert (await door.post(f"/v1/jobs/{job}/cancel")).json()["intent"] == "cancel"
        await worker.publish(2)
        await worker.finish("cancelled_by_customer")
        for late in (worker.commit(step(3)), worker.publish(2), worker.finish("completed"), worker.heartbeat()):
            await control.refused(late, grpc.StatusCode.ABORTED)
    shown = (await door.get(f"/v1/jobs/{job}")).json()
    assert (shown["state"], shown["usage"]) == ("cancelled", {"train.sft": 200})
    ends = [event for event in await control.events(api.system_engine, job, "state") if event.data["to"] == "cancelled"]
    assert len(ends) == 1
    again = await door.post(f"/v1/jobs/{job}/cancel")
    assert (again.status_code, again.json()) == (200, shown)
