"""Fixtures for every test. Nothing heavy is imported until a test asks for it.

- `database`: a fresh migrated database per test (real PostgreSQL); `module_database`: one per module.
- `app_engine`, `system_engine`: SQLAlchemy engines on `database` as finery_app and finery_system.
- `clock`: a FakeClock.

Property tests draw the same examples in every run, and no slow machine fails them.
"""

from __future__ import annotations

from collections.abc import AsyncIterator, Iterator
from typing import TYPE_CHECKING

import pytest
import pytest_asyncio
from hypothesis import HealthCheck, settings

if TYPE_CHECKING:
    from sqlalchemy.ext.asyncio import AsyncEngine

    from finery_testing.clock import FakeClock
    from finery_testing.postgres import Database, TestServer

settings.register_profile("finery", deadline=None, derandomize=True, suppress_health_check=[HealthCheck.too_slow])
settings.load_profile("finery")


@pytest.fixture(scope="session")
def postgres_server() -> Iterator[TestServer]:
    from finery_testing.postgres import running_server

    with running_server() as server:
        yield server


@pytest.fixture
def database(postgres_server: TestServer) -> Iterator[Database]:
    with postgres_server.database() as fresh:
        yield fresh


@pytest.fixture(scope="module")
def module_database(postgres_server: TestServer) -> Iterator[Database]:
    with postgres_server.database() as fresh:
        yield fresh


@pytest.fixture
def empty_database(postgres_server: TestServer) -> Iterator[Database]:
    """Roles and an empty schema: for tests of the migrations."""
    with postgres_server.database(migrated=False) as fresh:
        yield fresh


@pytest_asyncio.fixture
async def app_engine(database: Database) -> AsyncIterator[AsyncEngine]:
    from finery_service.db.engine import create_engine

    engine = create_engine(database.app_dsn)
    yield engine
    await engine.dispose()


@pytest_asyncio.fixture
async def system_engine(database: Database) -> AsyncIterator[AsyncEngine]:
    from finery_service.db.engine import create_engine

    engine = create_engine(database.system_dsn)
    yield engine
    await engine.dispose()


@pytest.fixture
def clock() -> FakeClock:
    from finery_testing.clock import FakeClock

    return FakeClock()
