from __future__ import annotations

import shutil
import tempfile
from collections.abc import AsyncIterator, Iterator
from pathlib import Path

import pytest

from finery_scheduler.backend import Backend
from finery_scheduler.backends.inline import InlineBackend
from finery_scheduler.backends.ray import RayBackend
from finery_scheduler.core.types import Node
from finery_testing.backends import stop_all
from finery_testing.ray_head import SLOTS, Head, start_head, stop_head


@pytest.fixture(scope="session")
def ray_head() -> Iterator[Head]:
    folder = Path(tempfile.mkdtemp(prefix="fr", dir="/tmp"))  # sockets lie in it: their paths must be short
    head = start_head(folder)
    yield head
    stop_head(head)
    shutil.rmtree(folder, ignore_errors=True)


@pytest.fixture(scope="session")
async def drivers_kept() -> AsyncIterator[list[RayBackend]]:
    """One backend, thus one driver process, for all tests against Ray."""
    kept: list[RayBackend] = []
    yield kept
    for pool in kept:
        await pool.close()


@pytest.fixture
async def ray_pool(ray_head: Head, drivers_kept: list[RayBackend]) -> AsyncIterator[RayBackend]:
    if not drivers_kept:
        drivers_kept.append(RayBackend(ray_head.address, ray_head.token, grant_timeout=3))
    await drivers_kept[0].start()
    yield drivers_kept[0]
    await stop_all(drivers_kept[0])


@pytest.fixture
async def inline_pool() -> AsyncIterator[InlineBackend]:
    pool = InlineBackend([Node("inline", SLOTS)])
    await pool.start()
    yield pool
    await stop_all(pool)
    await pool.close()


@pytest.fixture(params=["inline_pool", "ray_pool"])
def backend(request: pytest.FixtureRequest) -> Backend:
    pool: Backend = request.getfixturevalue(request.param)
    return pool
