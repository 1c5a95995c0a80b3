from __future__ import annotations

import asyncio
import json

import httpx
import pytest
from sqlalchemy import text
from sqlmodel import select

from finery.data.strict_json import canonical_sha256
from finery_service import housekeeping
from finery_service.auth import idempotency, store
from finery_service.db.engine import transaction
from finery_service.db.tables import EventRow, IdempotencyRow, JobRow
from finery_testing import factories
from finery_testing.api import CHAT_ROW, Api, Door


def keyed(key: str) -> dict[str, str]:
    return {"idempotency-key": key}


async def count(api: Api, door: Door) -> tuple[int, int]:
    """Jobs and first events of the tenant."""
    async with transaction(api.system_engine) as session:
        jobs = (await session.exec(select(JobRow).where(JobRow.tenant_id == door.tenant.id))).all()
        events = (await session.exec(select(EventRow).where(EventRow.tenant_id == door.tenant.id))).all()
    return len(jobs), len(events)


def code(answer: httpx.Response) -> tuple[int, str]:
    return answer.status_code, answer.json()["error"]["code"]


async def test_e01_replay_reuse_other_tenant_other_path_and_reordered_keys(api: Api) -> None:
    door, other = await api.tenant(), await api.tenant()
    file = await door.file_id()
    first = await door.job(training_file=file, name="a", headers=keyed("k1"))
    assert first.status_code == 201
    assert "idempotent-replayed" not in first.headers
    reused = await door.job(training_file=file, name="b", headers=keyed("k1"))
    assert code(reused) == (422, "idempotency_key_reused")
    assert reused.headers["x-should-retry"] == "false"
    replay = await door.job(training_file=file, name="a", headers=keyed("k1"))
    assert (replay.status_code, replay.json()) == (201, first.json())
    assert replay.headers["idempotent-replayed"] == "true"
    body = {"model": factories.MODEL_NAME, "name": "a", "training_file": file, "method": "sft"}
    reordered = await door.client.post("/v1/jobs", content=json.dumps(body, indent=3), headers=keyed("k1"))
    assert reordered.json()["id"] == first.json()["id"]
    theirs = await other.job(name="a", headers=keyed("k1"))
    assert theirs.status_code == 201
    assert theirs.json()["id"] != first.json()["id"]
    assert code(await door.upload([CHAT_ROW], headers=keyed("k1"))) == (422, "idempotency_key_reused")
    assert await count(api, door) == (1, 1)


async def test_replay_answers_as_it_was_even_if_the_job_went_on(api: Api) -> None:
    door = await api.tenant()
    file = await door.file_id()
    first = await door.job(training_file=file, headers=keyed("k"))
    await door.post(f"/v1/jobs/{first.json()['id']}/cancel")
    assert (await door.job(training_file=file, headers=keyed("k"))).json() == first.json()


async def test_refused_request_leaves_its_key_unused(api: Api) -> None:
    door = await api.tenant()
    assert (await door.job(training_file="file_unknown", headers=keyed("k"))).status_code == 400
    assert (await door.job(headers=keyed("k"))).status_code == 201


@pytest.mark.parametrize("key", ["", " ", "a b", "x" * 256, "caf\xe9"])
async def test_malformed_key_is_a_400(api: Api, key: str) -> None:
    door = await api.tenant()
    file = await door.file_id()
    headers = [(b"idempotency-key", key.encode("latin-1"))]
    body = {"method": "sft", "model": factories.MODEL_NAME, "training_file": file}
    answer = await door.client.post("/v1/jobs", json=body, headers=headers)
    assert code(answer) == (400, "invalid_idempotency_key")


async def test_e02_fifty_concurrent_creates_make_one_job(api: Api) -> None:
    door = await api.tenant()
    file = await door.file_id()
    answers = await asyncio.gather(*(door.job(training_file=file, headers=keyed("k")) for _ in range(50)))
    assert {answer.status_code for answer in answers} <= {201, 409}
    made = {answer.json()["id"] for answer in answers if answer.status_code == 201}
    assert len(made) == 1
    for answer in answers:
        if answer.status_code == 409:
            assert code(answer) == (409, "request_in_progress")
            assert answer.headers["retry-after"] == "1"
    assert await count(api, door) == (1, 1)
    async with transaction(api.system_engine) as session:
        rows = (await session.exec(select(IdempotencyRow).where(IdempotencyRow.tenant_id == door.tenant.id))).all()
    assert [row.response["id"] for row in rows] == list(made)


async def test_e01_while_the_first_is_in_flight_a_twin_gets_409_and_another_body_422(api: Api) -> None:
    """The first request stands still inside its transaction, as the test holds it."""
    door = await api.tenant()
    file = await door.file_id()
    body = {"method": "sft", "model": factories.MODEL_NAME, "training_file": file}
    once = idempotency.Once(door.tenant.id, "k", "POST /v1/jobs", canonical_sha256(body))
    async with transaction(api.app.state.services.app_engine, door.tenant.id) as session:
        assert await store.take_turn(session, once.scope, "k", once.fingerprint) == "ours"
        assert code(await door.post("/v1/jobs", body, headers=keyed("k"))) == (409, "request_in_progress")
        other = await door.post("/v1/jobs", {**body, "name": "b"}, headers=keyed("k"))
        assert code(other) == (422, "idempotency_key_reused")
        assert (await door.post("/v1/jobs", body, headers=keyed("k2"))).status_code == 201
    assert (await door.post("/v1/jobs", body, headers=keyed("k"))).status_code == 201


async def test_key_and_job_are_one_transaction(api: Api, monkeypatch: pytest.MonkeyPatch) -> None:
    door = await api.tenant()
    file = await door.file_id()

    def broken(*_: object) -> None:
        raise RuntimeError("after the job was inserted")

    with monkeypatch.context() as patch:
        patch.setattr("finery_service.auth.idempotency.answer", broken)
        assert (await door.job(training_file=file, headers=keyed("k"))).status_code == 500
    assert await count(api, door) == (0, 0)
    answer = await door.job(training_file=file, headers=keyed("k"))
    assert answer.status_code == 201
    assert "idempotent-replayed" not in answer.headers


async def test_upload_is_keyed_by_name_and_content(api: Api) -> None:
    door = await api.tenant()
    first = await door.upload([CHAT_ROW], "a.jsonl", headers=keyed("k"))
    replay = await door.upload([CHAT_ROW], "a.jsonl", headers=keyed("k"))
    assert (replay.status_code, replay.json()) == (201, first.json())
    assert replay.headers["idempotent-replayed"] == "true"
    assert code(await door.upload([CHAT_ROW], "b.jsonl", headers=keyed("k"))) == (422, "idempotency_key_reused")
    assert code(await door.upload([CHAT_ROW] * 2, "a.jsonl", headers=keyed("k"))) == (422, "idempotency_key_reused")
    assert len((await door.get("/v1/files")).json()["data"]) == 1
    assert len([key for key in api.objects() if door.tenant.id in key]) == 1, "refused uploads leave nothing"


async def test_operators_requests_are_idempotent_and_no_secret_is_stored(api: Api) -> None:
    operator = await api.operator()
    first = await operator.post("/v1/tenants", json={"name": "once"}, headers=keyed("t1"))
    again = await operator.post("/v1/tenants", json={"name": "once"}, headers=keyed("t1"))
    assert first.json() == again.json()
    path = f"/v1/tenants/{first.json()['id']}/keys"
    key = (await operator.post(path, json={}, headers=keyed("t2"))).json()
    replay = (await operator.post(path, json={}, headers=keyed("t2"))).json()
    assert replay == {**key, "secret": None}
    async with transaction(api.system_engine) as session:
        stored = await session.execute(text("select string_agg(response::text, '') from idempotency_keys"))
    assert key["secret"] not in stored.scalar_one()


async def test_keys_are_remembered_for_seven_days_and_then_forgotten(own_api: Api) -> None:
    door = await own_api.tenant()
    file = await door.file_id()
    first = (await door.job(training_file=file, headers=keyed("k"))).json()["id"]
    own_api.clock.advance(7 * 24 * 3600 - 1)
    await housekeeping.sweep(own_api.app.state.services)
    assert (await door.job(training_file=file, headers=keyed("k"))).json()["id"] == first
    own_api.clock.advance(2)
    await housekeeping.sweep(own_api.app.state.services)
    assert (await door.job(training_file=file, headers=keyed("k"))).json()["id"] != first
    assert await count(own_api, door) == (2, 2)
