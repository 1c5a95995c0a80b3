"""Environments may be long (whole programs that grade): lists of them, and of jobs that brought one, stay bounded."""

from __future__ import annotations

from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import pytest
import pytest_asyncio
from sqlalchemy import event
from sqlalchemy.ext.asyncio import AsyncEngine

from finery_service.http.paging import PAGE_BYTES
from finery_testing.api import Api, Door, running_api
from finery_testing.clock import FakeClock

from .environments_support import GYM, prompts, prompts_file

COUNT = 7
FEW = {"hyperparameters": {"prompts_per_step": 1}}
SOURCE = "def grade(sample, item):\n    return 1.0\n" + "#" * 250_000


@pytest_asyncio.fixture
async def wide_api(
    app_engine: AsyncEngine, system_engine: AsyncEngine, clock: FakeClock, tmp_path: Path
) -> AsyncIterator[Api]:
    """An API with the limits of production."""
    async with running_api(app_engine, system_engine, tmp_path, clock) as running:
        yield running


def long_spec(file: str) -> dict[str, Any]:
    """About a megabyte, as long as a body may be."""
    graders = {f"g{n}": {"type": "python", "source": SOURCE} for n in range(4)}
    return prompts(file, {"type": "multi", "graders": graders, "calculate_output": "g0 + g1 + g2 + g3"})


async def pages(door: Door, path: str, limit: int) -> list[tuple[list[str], int]]:
    found: list[tuple[list[str], int]] = []
    params: dict[str, Any] = {"limit": limit}
    while True:
        answer = await door.get(path, params=params)
        page = answer.json()
        found.append(([one["id"] for one in page["data"]], len(answer.content)))
        assert page["last_id"] == found[-1][0][-1], "no page is empty"
        if not page["has_more"]:
            return found
        params["after"] = page["last_id"]


@pytest.mark.parametrize("path", ["/v1/jobs", "/v1/environments"])
async def test_pages_of_long_environments_end_early_and_lose_nothing(wide_api: Api, path: str) -> None:
    door = await wide_api.tenant()
    spec = long_spec(await prompts_file(door))
    made = []
    for n in range(COUNT):
        environment = GYM if n == 3 else spec
        job = {"method": "rl", "model": "smollm2-135m-instruct", "environment": environment} | FEW
        answer = await door.post(path, job if path == "/v1/jobs" else {"spec": environment})
        assert answer.status_code == 201, answer.text[:500]
        made.append(answer.json()["id"])
    for limit in (1, 3, 100):
        found = await pages(door, path, limit)
        assert sorted(id_ for ids, _ in found for id_ in ids) == sorted(made)
        assert all(len(ids) <= limit and size < PAGE_BYTES + 2**21 for ids, size in found)
    assert len(await pages(door, path, 100)) == 2, "six of a megabyte, four or five on the first page"


async def test_an_environment_is_read_only_by_who_shows_it(wide_api: Api, app_engine: AsyncEngine) -> None:
    """Clients ask for events again and again, and streams live for days."""
    door = await wide_api.tenant()
    job = {"method": "rl", "model": "smollm2-135m-instruct", "environment": GYM}
    path = f"/v1/jobs/{(await door.post('/v1/jobs', job)).json()['id']}"
    asked: list[str] = []
    event.listen(app_engine.sync_engine, "before_cursor_execute", lambda *call: asked.append(call[2]))
    for part in ("/events", "/rollouts"):
        assert (await door.get(f"{path}{part}")).status_code == 200
    assert [statement for statement in asked if "environment" in statement] == []
    await door.get(path)
    assert [statement for statement in asked if "environment" in statement]
