"""Filters of lists, and what PATCH changes of a job."""

from __future__ import annotations

from datetime import datetime, timedelta
from typing import Any

import pytest

from finery_testing import control, factories
from finery_testing.api import Api, Door, checkpoint


async def jobs(door: Door, **parameters: Any) -> list[str]:
    answer = await door.client.get("/v1/jobs", params=parameters)
    assert answer.status_code == 200, answer.text
    return [job["id"] for job in answer.json()["data"]]


async def made(api: Api, door: Door, at: datetime, **values: Any) -> str:
    return (await factories.job(api.system_engine, door.tenant, now=at, **values)).id


async def test_jobs_by_state_method_project_and_time(api: Api) -> None:
    door, other = await api.tenant(), await api.tenant()
    start = api.clock()
    queued, running, paused = [
        await made(api, door, start + timedelta(seconds=n), state=state)
        for n, state in enumerate(("queued", "running", "paused"))
    ]
    await made(api, other, start)
    assert await jobs(door, state="queued") == [queued]
    assert await jobs(door, state=["queued", "paused"]) == [paused, queued]
    assert await jobs(door, state="failed") == []
    assert await jobs(door, method="sft") == [paused, running, queued]
    assert await jobs(door, project=door.tenant.project_id) == [paused, running, queued]
    assert await jobs(door, created_after="2026-12-01T09:00:00Z") == [paused, running], "strictly later"
    assert await jobs(door, created_before="2026-12-01T10:00:01+01:00") == [queued], "strictly earlier, any zone"
    assert await jobs(door, created_after="2026-12-01T09:00:00Z", created_before="2026-12-01T09:00:02z") == [running]
    assert await jobs(door, created_after="2026-12-01T09:00:00Z", state="paused", limit=1) == [paused]


@pytest.mark.parametrize("param", ["created_after", "created_before"])
@pytest.mark.parametrize(
    "time",
    [
        "2026-11-01T01:30:00",
        "2026-11-01",
        "1793496600",
        "1793496600000",
        "20261101T013000Z",
        "2026-W44-7T01:30:00Z",
        "2026-11-01T24:30:00Z",
        "2026-02-30T00:00:00Z",
        "2026-11-01T01:30:00 00:00",
        "٢٠٢٦-11-01T01:30:00Z",
        "now",
        "",
    ],
)
async def test_e18_a_time_that_is_not_rfc_3339_with_a_zone_is_refused(api: Api, param: str, time: str) -> None:
    answer = await (await api.tenant()).client.get("/v1/jobs", params={param: time})
    error = answer.json()["error"]
    assert (answer.status_code, error["code"], error["param"]) == (400, "invalid_time", param)


@pytest.mark.parametrize(
    ("parameters", "status", "param"),
    [
        ({"state": "done"}, 400, "state"),
        ({"method": "ppo"}, 400, "method"),
        ({"project": "proj_unknown"}, 404, "project"),
        ({"project": "%00"}, 404, "project"),
        ({"states": "queued"}, 400, "states"),
    ],
)
async def test_a_filter_that_cannot_match_is_refused(
    api: Api, parameters: dict[str, str], status: int, param: str
) -> None:
    answer = await (await api.tenant()).client.get("/v1/jobs", params=parameters)
    assert (answer.status_code, answer.json()["error"]["param"]) == (status, param)


async def test_anothers_project_is_an_unknown_one(api: Api) -> None:
    door, other = await api.tenant(), await api.tenant()
    answer = await door.client.get("/v1/jobs", params={"project": other.tenant.project_id})
    assert (answer.status_code, answer.json()["error"]["code"]) == (404, "project_not_found")


async def test_e05_a_job_that_leaves_the_filter_between_pages_loses_nobody(api: Api) -> None:
    door = await api.tenant()
    ids = [await made(api, door, api.clock() + timedelta(seconds=n)) for n in range(4)]
    first = (await door.get("/v1/jobs?state=queued&limit=2")).json()
    await control.execute(api.system_engine, "update jobs set state = 'paused' where id = :id", id=first["last_id"])
    second = (await door.get(f"/v1/jobs?state=queued&limit=2&after={first['last_id']}")).json()
    assert [job["id"] for page in (first, second) for job in page["data"]] == ids[::-1]


async def test_patch_sets_what_is_given_and_leaves_the_spec(api: Api) -> None:
    door = await api.tenant()
    job = (await door.job(name="a", metadata={"k": "1"})).json()
    path = f"/v1/jobs/{job['id']}"
    row = await control.job_row(api.system_engine, job["id"])
    named = await door.client.patch(path, json={"name": "b"})
    assert (named.status_code, named.json()) == (200, {**job, "name": "b"})
    assert (await door.client.patch(path, json={"metadata": {"x": "y"}})).json()["metadata"] == {"x": "y"}
    cleared = (await door.client.patch(path, json={"name": None, "metadata": {}})).json()
    assert (cleared["name"], cleared["metadata"]) == (None, {})
    assert (await door.get(path)).json() == cleared
    after = await control.job_row(api.system_engine, job["id"])
    assert (after.spec, after.version, after.state) == (row.spec, row.version, row.state)
    await control.execute(
        api.system_engine, "update jobs set state = 'failed', finished_at = created_at where id = :id", id=job["id"]
    )
    assert (await door.client.patch(path, json={"name": "c"})).json()["name"] == "c", "an ended job, too"


@pytest.mark.parametrize(
    ("body", "param", "code"),
    [
        ({}, "name", "missing_field"),
        ({"state": "paused"}, "state", "unknown_field"),
        ({"name": ""}, "name", "invalid_value"),
        ({"name": 7}, "name", "invalid_value"),
        ({"metadata": None}, "metadata", "invalid_value"),
        ({"metadata": {"a": 1}}, "metadata.a", "invalid_value"),
        ({"metadata": {str(n): "" for n in range(17)}}, "metadata", "invalid_value"),
        ({"name": "x\u0000"}, "name", "nul_character"),
    ],
)
async def test_patch_is_as_strict_as_create(api: Api, body: dict[str, Any], param: str, code: str) -> None:
    door = await api.tenant()
    job = (await door.job()).json()
    answer = await door.client.patch(f"/v1/jobs/{job['id']}", json=body)
    error = answer.json()["error"]
    assert (answer.status_code, error["param"], error["code"]) == (400, param, code), error
    assert (await door.get(f"/v1/jobs/{job['id']}")).json() == job


async def test_patch_of_an_unknown_or_foreign_job_is_404(api: Api) -> None:
    door, other = await api.tenant(), await api.tenant()
    theirs = (await other.job()).json()["id"]
    for id_ in (theirs, "job_unknown"):
        answer = await door.client.patch(f"/v1/jobs/{id_}", json={"name": "mine"})
        assert (answer.status_code, answer.json()["error"]["code"]) == (404, "job_not_found")


async def test_e05_a_checkpoint_deleted_between_pages_shifts_nothing(api: Api) -> None:
    door = await api.tenant()
    job = await factories.job(api.system_engine, door.tenant, now=api.clock(), state="succeeded")
    start = api.clock()
    ids = [
        (
            await checkpoint(
                api.system_engine, job, now=api.clock(), step=n + 1, created_at=start + timedelta(seconds=n)
            )
        ).id
        for n in range(25)
    ]
    first = (await door.get("/v1/checkpoints?limit=10")).json()
    deleted = [first["last_id"], ids[15]]  # the cursor itself, and one that is still to come
    for id_ in deleted:
        assert (await door.client.delete(f"/v1/checkpoints/{id_}")).status_code == 200
    second = (await door.get(f"/v1/checkpoints?limit=10&after={first['last_id']}")).json()
    third = (await door.get(f"/v1/checkpoints?limit=10&after={second['last_id']}")).json()
    seen = [item["id"] for page in (first, second, third) for item in page["data"]]
    assert seen == [id_ for id_ in ids if id_ != ids[15]], "each once, in order"
    assert not third["has_more"]


async def test_e04_equal_times_lose_nothing_oldest_first_either(api: Api) -> None:
    door = await api.tenant()
    job = await factories.job(api.system_engine, door.tenant, now=api.clock(), state="succeeded")
    at = datetime.fromisoformat("2026-12-01T12:00:00.123456Z")
    made = {(await checkpoint(api.system_engine, job, now=at, step=n + 1)).id for n in range(15)}
    first = (await door.get("/v1/checkpoints?limit=10")).json()
    second = (await door.get(f"/v1/checkpoints?limit=10&after={first['last_id']}")).json()
    ids = [item["id"] for page in (first, second) for item in page["data"]]
    assert (len(first["data"]), len(second["data"]), second["has_more"]) == (10, 5, False)
    assert set(ids) == made
    assert ids == sorted(ids), "one total order"
