from __future__ import annotations

import asyncio
import json
from collections.abc import AsyncIterator
from typing import Any

import pytest
from sqlmodel import select

from finery.types.jobs import JobState
from finery.types.reasons import JobReason
from finery_service.db.engine import transaction
from finery_service.db.tables import JobRow
from finery_service.jobs import store
from finery_testing import factories
from finery_testing.api import CHAT_ROW, Api


async def set_state(api: Api, job_id: str, **values: Any) -> None:
    async with transaction(api.system_engine) as session:
        row = (await session.exec(select(JobRow).where(JobRow.id == job_id))).one()
        for name, value in values.items():
            setattr(row, name, value)
        session.add(row)


async def finish(api: Api, job_id: str, to: JobState, reason: JobReason) -> None:
    """As the reconciler does it; the states in between do not matter here."""
    await set_state(api, job_id, state="running")
    async with transaction(api.system_engine) as session:
        assert await store.move(session, job_id, to=to, reason=reason, now=api.clock())


async def test_job_is_created_and_read_back(api: Api) -> None:
    door = await api.tenant()
    created = await door.job(name="bot", metadata={"a": "b"}, seed=7, hyperparameters={"learning_rate": 1e-3})
    assert created.status_code == 201, created.text
    job = created.json()
    assert (job["state"], job["reason"], job["intent"]) == ("validating", "waiting_for_validation", "run")
    assert job["message"] == "The training data is being prepared."
    assert (job["model"], job["project"], job["name"]) == (factories.MODEL_NAME, door.tenant.project_id, "bot")
    assert (job["seed"], job["metadata"], job["hyperparameters"]["learning_rate"]) == (7, {"a": "b"}, 1e-3)
    assert job["hyperparameters"]["batch_tokens"] == 8192, "defaults are told"
    assert (job["usage"], job["cost"], job["attempts"]) == ({}, "0", 0)
    assert job["created_at"] == "2026-12-01T09:00:00.000000Z"
    assert (await door.get(f"/v1/jobs/{job['id']}")).json() == job
    events = (await door.get(f"/v1/jobs/{job['id']}/events")).json()["data"]
    assert [(event["seq"], event["type"], event["data"]["to"]) for event in events] == [(1, "state", "validating")]


async def test_first_hour_unknown_file_and_bad_learning_rate_name_a_field(api: Api) -> None:
    door = await api.tenant()
    answer = await door.job(training_file="file_unknown", hyperparameters={"learning_rate": -1})
    error = answer.json()["error"]
    assert (answer.status_code, error["param"]) == (400, "hyperparameters.learning_rate")
    assert "greater than 0" in error["message"]
    assert "-1" in error["message"]


LR = "hyperparameters.learning_rate"


@pytest.mark.parametrize(
    ("fields", "param", "code"),
    [
        ('"hyperparameters": {"learning_rate": NaN}', LR, "invalid_json"),
        ('"hyperparameters": {"learning_rate": Infinity}', LR, "invalid_json"),
        ('"hyperparameters": {"learning_rate": -Infinity}', LR, "invalid_json"),
        ('"hyperparameters": {"learning_rate": 1e999}', LR, "invalid_json"),
        ('"hyperparameters": {"learning_rate": "NaN"}', LR, "invalid_value"),
        ('"hyperparameters": {"learning_rate": "0.1"}', LR, "invalid_value"),
        ('"hyperparameters": {"learning_rate": -0.0}', LR, "invalid_value"),
        ('"hyperparameters": {"learning_rate": true}', LR, "invalid_value"),
        ('"hyperparameters": {"learning_rate": null}', LR, "invalid_value"),
        ('"hyperparameters": {"epochs": 1.5}', "hyperparameters.epochs", "invalid_value"),
        ('"hyperparameters": {"epochs": 0}', "hyperparameters.epochs", "invalid_value"),
        ('"hyperparameters": {"epochs": ' + "9" * 5000 + "}", None, "invalid_json"),
        ('"hyperparameters": {"max_length": 0}', "hyperparameters.max_length", "invalid_value"),
        ('"hyperparameters": {"learningrate": 1}', "hyperparameters.learningrate", "unknown_field"),
        ('"hyperparameters": {"epochs": 1, "epochs": 2}', "hyperparameters.epochs", "duplicate_key"),
        ('"hyperparameters": []', "hyperparameters", "invalid_value"),
        ('"adapter": {"targets": ["q_proj", "nope"]}', "adapter.targets[1]", "invalid_value"),
        ('"adapter": {"type": "qlora"}', "adapter", "invalid_value"),
        ('"adapter": {"type": "full", "rank": 4}', "adapter.rank", "unknown_field"),
        ('"metadata": {"a": 1}', "metadata.a", "invalid_value"),
        ('"metadata": {"a": "x\\u0000"}', "metadata.a", "nul_character"),
        ('"metadata": {"a": "x\\ud83d"}', "metadata.a", "invalid_unicode"),
        ('"limits": {"max_cost": 1.5}', "limits.max_cost", "invalid_value"),
        ('"priority": "urgent"', "priority", "invalid_value"),
        (f'"resources": {{"accelerator_type": "{"H" * 65}"}}', "resources.accelerator_type", "invalid_value"),
        ('"from_checkpoint": "ckpt_1"', "model", "invalid_value"),
        ('"seed": -1', "seed", "invalid_value"),
        ('"deep": ' + "[" * 20_000, None, "invalid_json"),
    ],
)
async def test_a29_bad_values_are_refused_by_name(api: Api, fields: str, param: str | None, code: str) -> None:
    door = await api.tenant()
    body = '{"method": "sft", "model": "m", "training_file": "file_1", ' + fields + "}"
    answer = await door.client.post("/v1/jobs", content=body)
    assert answer.status_code == 400, answer.text
    error = answer.json()["error"]
    assert error["code"] == code, error
    assert error["param"] == param, error
    json.loads(answer.text, parse_constant=lambda word: pytest.fail(f"{word} in the answer"))


@pytest.mark.parametrize("body", [b"", b"[]", b"null", b"{", b"\xff", b'\xef\xbb\xbf{"method": "sft"}', b"a=b"])
async def test_bodies_that_are_no_object_are_refused(api: Api, body: bytes) -> None:
    door = await api.tenant()
    answer = await door.client.post("/v1/jobs", content=body)
    assert answer.status_code == 400, answer.text
    assert answer.json()["error"]["message"]


async def test_all_wrong_fields_are_listed(api: Api) -> None:
    door = await api.tenant()
    answer = await door.post(
        "/v1/jobs", {"method": "sft", "seed": "x", "surprise": 1, "hyperparameters": {"epochs": 0}}
    )
    params = {detail["param"]: detail["code"] for detail in answer.json()["error"]["details"]}
    assert params == {
        "training_file": "missing_field",
        "seed": "invalid_value",
        "surprise": "unknown_field",
        "hyperparameters.epochs": "invalid_value",
    }


async def test_body_over_the_limit_is_413_naming_it(api: Api) -> None:
    door = await api.tenant()
    big = {"method": "sft", "name": "x" * 70_000}

    async def slowly() -> AsyncIterator[bytes]:
        for _ in range(70):
            yield b"x" * 1000

    for answer in [await door.post("/v1/jobs", big), await door.client.post("/v1/jobs", content=slowly())]:
        assert (answer.status_code, answer.json()["error"]["code"]) == (413, "body_too_large")
        assert "65536" in answer.json()["error"]["message"]


async def test_h03_compressed_bodies_are_refused(api: Api) -> None:
    door = await api.tenant()
    for path in ("/v1/jobs", "/v1/files"):
        answer = await door.client.post(path, content=b"\x1f\x8b", headers={"content-encoding": "gzip"})
        assert (answer.status_code, answer.json()["error"]["code"]) == (415, "unsupported_content_encoding")


@pytest.mark.parametrize(
    ("fields", "param", "code"),
    [
        ({"model": "nope"}, "model", "model_not_found"),
        ({"model": "no\u2028pe"}, "model", "model_not_found"),
        ({"training_file": "file_unknown"}, "training_file", "file_not_found"),
        ({"validation_file": "file_unknown"}, "validation_file", "file_not_found"),
        ({"from_checkpoint": "ckpt_unknown"}, "from_checkpoint", "checkpoint_not_found"),
        ({"project": "proj_unknown"}, "project", "project_not_found"),
        ({"hyperparameters": {"max_length": 8193}}, "hyperparameters.max_length", "max_length_too_long"),
        ({"resources": {"accelerators": 2}}, "resources.accelerators", "not_available"),
        ({"limits": {"max_cost": "1.50"}}, "limits.max_cost", "not_available"),
        ({"limits": {"max_tokens": 10}}, "limits.max_tokens", "not_available"),
        ({"limits": {"max_seconds": 10}}, "limits.max_seconds", "not_available"),
    ],
)
async def test_what_cannot_be_had_is_a_400_naming_the_field(
    api: Api, fields: dict[str, Any], param: str, code: str
) -> None:
    door = await api.tenant()
    answer = await door.job(**fields)
    error = answer.json()["error"]
    assert (answer.status_code, error["param"], error["code"]) == (400, param, code), error
    assert (await door.get("/v1/jobs")).json()["data"] == [], "nothing was left behind"


async def test_a32_job_on_an_invalid_file_is_refused_with_its_problems(api: Api) -> None:
    door = await api.tenant()
    file = (await door.upload([CHAT_ROW, 7])).json()
    assert file["status"] == "invalid"
    answer = await door.job(training_file=file["id"])
    error = answer.json()["error"]
    assert (answer.status_code, error["code"], error["param"]) == (400, "invalid_file", "training_file")
    assert [(detail["line"], detail["code"]) for detail in error["details"]] == [(2, "not_an_object")]


async def test_model_by_id_is_the_model_by_name(api: Api) -> None:
    door = await api.tenant()
    assert (await door.job(model=factories.MODEL_ID)).json()["model"] == factories.MODEL_NAME


async def test_e10_cancel_sets_the_intent_once(api: Api) -> None:
    door = await api.tenant()
    job = (await door.job()).json()
    first = await door.post(f"/v1/jobs/{job['id']}/cancel")
    assert (first.status_code, first.json()["intent"], first.json()["state"]) == (200, "cancel", "validating")
    async with transaction(api.system_engine) as session:
        version = (await session.exec(select(JobRow.version).where(JobRow.id == job["id"]))).one()
    second = await door.post(f"/v1/jobs/{job['id']}/cancel")
    assert (second.status_code, second.json()) == (200, first.json())
    async with transaction(api.system_engine) as session:
        assert (await session.exec(select(JobRow.version).where(JobRow.id == job["id"]))).one() == version
    await finish(api, job["id"], JobState.CANCELLED, JobReason.CANCELLED_BY_CUSTOMER)
    third = await door.post(f"/v1/jobs/{job['id']}/cancel")
    assert (third.status_code, third.json()["state"]) == (200, "cancelled")


async def test_e10_cancel_after_the_end_is_409_with_the_state(api: Api) -> None:
    door = await api.tenant()
    job = (await door.job()).json()
    await finish(api, job["id"], JobState.SUCCEEDED, JobReason.COMPLETED)
    answer = await door.post(f"/v1/jobs/{job['id']}/cancel")
    error = answer.json()["error"]
    assert (answer.status_code, error["code"], error["details"]) == (
        409,
        "job_already_terminal",
        [{"state": "succeeded"}],
    )
    assert answer.headers["x-should-retry"] == "false"
    assert (await door.post("/v1/jobs/job_unknown/cancel")).status_code == 404


async def test_e10_concurrent_cancels_change_the_row_once(api: Api) -> None:
    door = await api.tenant()
    job = (await door.job()).json()
    answers = await asyncio.gather(*(door.post(f"/v1/jobs/{job['id']}/cancel") for _ in range(10)))
    assert {answer.status_code for answer in answers} == {200}
    async with transaction(api.system_engine) as session:
        assert (await session.exec(select(JobRow.version).where(JobRow.id == job["id"]))).one() == 2


async def test_error_position_and_times_are_told(api: Api) -> None:
    door = await api.tenant()
    job = (await door.job()).json()
    now = api.clock()
    await set_state(api, job["id"], state="queued", reason="waiting_behind", queue_position=3, queued_at=now)
    queued = (await door.get(f"/v1/jobs/{job['id']}")).json()
    assert (queued["position"], queued["message"]) == (3, "Earlier jobs are waiting for the same accelerators.")
    error = {"message": "m", "type": "server_error", "code": "c", "param": None}
    await set_state(api, job["id"], state="failed", reason="invalid_data", error=error, finished_at=now)
    failed = (await door.get(f"/v1/jobs/{job['id']}")).json()
    assert (failed["error"]["code"], failed["position"], failed["finished_at"]) == (
        "c",
        None,
        "2026-12-01T09:00:00.000000Z",
    )
