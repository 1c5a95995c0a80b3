from __future__ import annotations

from collections.abc import AsyncIterator
from pathlib import Path
from typing import TYPE_CHECKING

import pytest
import pytest_asyncio

if TYPE_CHECKING:
    from sqlalchemy.ext.asyncio import AsyncEngine

    from finery_testing.api import Api
    from finery_testing.clock import FakeClock
    from finery_testing.postgres import Database

LIMITS = {"max_body_bytes": 2**16, "max_file_bytes": 2**20, "heartbeat_seconds": 0.2}


@pytest_asyncio.fixture(scope="module")
async def api(module_database: Database, tmp_path_factory: pytest.TempPathFactory) -> AsyncIterator[Api]:
    """The API with small limits, one for a module: every test makes its own tenants in it and breaks nothing."""
    from finery_service.db.engine import create_engine
    from finery_testing.api import running_api
    from finery_testing.clock import FakeClock

    app_engine, system_engine = create_engine(module_database.app_dsn), create_engine(module_database.system_dsn)
    folder = tmp_path_factory.mktemp("objects")
    async with running_api(app_engine, system_engine, folder, FakeClock(), **LIMITS) as running:
        yield running
    await app_engine.dispose()
    await system_engine.dispose()


@pytest_asyncio.fixture
async def own_api(
    app_engine: AsyncEngine, system_engine: AsyncEngine, clock: FakeClock, tmp_path: Path
) -> AsyncIterator[Api]:
    """An API of the test's own, to break."""
    from finery_testing.api import running_api

    async with running_api(app_engine, system_engine, tmp_path / "objects", clock, **LIMITS) as running:
        yield running
