from __future__ import annotations

from datetime import UTC, datetime, timedelta

import pytest

from finery_testing import factories
from finery_testing.api import Api, Door


async def pages(door: Door, path: str, limit: int) -> list[list[str]]:
    found: list[list[str]] = []
    after = ""
    while True:
        page = (await door.get(f"{path}?limit={limit}{after}")).json()
        found.append([item["id"] for item in page["data"]])
        if not page["has_more"]:
            return found
        assert page["last_id"] == found[-1][-1]
        after = f"&after={page['last_id']}"


async def test_e04_equal_times_lose_and_repeat_nothing(api: Api) -> None:
    door = await api.tenant()
    at = datetime(2026, 12, 1, 12, 0, 0, 123456, tzinfo=UTC)
    file = await factories.file(api.system_engine, door.tenant, now=at)
    made = {(await factories.job(api.system_engine, door.tenant, now=at, training_file=file)).id for _ in range(15)}
    found = await pages(door, "/v1/jobs", 10)
    assert [len(page) for page in found] == [10, 5]
    ids = [id_ for page in found for id_ in page]
    assert len(ids) == 15
    assert set(ids) == made
    assert ids == sorted(ids, reverse=True), "one total order"


async def test_e05_inserts_between_pages_shift_nothing(api: Api) -> None:
    door = await api.tenant()
    file = await factories.file(api.system_engine, door.tenant, now=api.clock())
    start = api.clock()
    made = [
        (await factories.job(api.system_engine, door.tenant, now=start + timedelta(seconds=n), training_file=file)).id
        for n in range(25)
    ]
    first = (await door.get("/v1/jobs?limit=10")).json()
    for n in range(3):
        await factories.job(api.system_engine, door.tenant, now=start + timedelta(seconds=60 + n), training_file=file)
    second = (await door.get(f"/v1/jobs?limit=10&after={first['last_id']}")).json()
    third = (await door.get(f"/v1/jobs?limit=10&after={second['last_id']}")).json()
    seen = [item["id"] for page in (first, second, third) for item in page["data"]]
    assert seen == made[::-1]
    assert not third["has_more"]


@pytest.mark.parametrize("after", ["garbage", "job_unknown", "", "file_1", "1;drop table jobs"])
async def test_e04_garbage_cursor_is_a_400(api: Api, after: str) -> None:
    door = await api.tenant()
    answer = await door.client.get("/v1/jobs", params={"after": after})
    assert (answer.status_code, answer.json()["error"]["code"]) == (400, "invalid_cursor")
