from __future__ import annotations

from collections.abc import AsyncIterator
from pathlib import Path

import pytest_asyncio
from sqlalchemy.ext.asyncio import AsyncEngine

from finery_testing.api import Api, running_api
from finery_testing.clock import FakeClock


@pytest_asyncio.fixture
async def api(
    app_engine: AsyncEngine, system_engine: AsyncEngine, clock: FakeClock, tmp_path: Path
) -> AsyncIterator[Api]:
    """The API with small limits: 64 KiB of JSON, 1 MiB of file."""
    limits = {"max_body_bytes": 2**16, "max_file_bytes": 2**20, "heartbeat_seconds": 0.2}
    async with running_api(app_engine, system_engine, tmp_path / "objects", clock, **limits) as running:
        yield running
