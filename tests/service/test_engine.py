"""Connections: what a frozen process and an error message must not do."""

from __future__ import annotations

import asyncio

import pytest
from sqlalchemy import text
from sqlalchemy.exc import DBAPIError
from sqlalchemy.ext.asyncio import AsyncEngine

from finery_service.db.engine import create_engine, transaction
from finery_service.jobs import store
from finery_service.rpc.workers import _DATABASE_AWAY
from finery_testing import factories
from finery_testing.clock import FakeClock
from finery_testing.postgres import Database


async def test_a_process_frozen_inside_a_transaction_does_not_keep_a_job_locked(
    database: Database, system_engine: AsyncEngine, clock: FakeClock
) -> None:
    job = await factories.job(system_engine, await factories.tenant(system_engine, now=clock()), now=clock())
    frozen = create_engine(database.app_dsn, idle_seconds=0.3)
    holds, thaw = asyncio.Event(), asyncio.Event()

    async def freeze() -> None:
        async with transaction(frozen, job.tenant_id) as session:
            assert await store.lock(session, job.id) is not None
            holds.set()
            await thaw.wait()
            await session.execute(text("update jobs set intent = 'cancel'"))

    holder = asyncio.create_task(freeze())
    await holds.wait()
    async with asyncio.timeout(10), transaction(system_engine) as session:
        assert await store.lock(session, job.id) is not None
    thaw.set()
    with pytest.raises(_DATABASE_AWAY):  # what it had begun is undone; a worker that called tries again
        await holder
    await frozen.dispose()


async def test_every_connection_has_that_limit(system_engine: AsyncEngine) -> None:
    async with transaction(system_engine) as session:
        shown = (await session.execute(text("show idle_in_transaction_session_timeout"))).scalar_one()
    assert shown == "10s"


async def test_an_error_of_the_database_names_no_parameters(system_engine: AsyncEngine) -> None:
    with pytest.raises(DBAPIError) as caught:
        async with transaction(system_engine) as session:
            await session.execute(text("select cast(:secret as text), 1 / 0"), {"secret": "fny_customers_own"})
    assert "division by zero" in str(caught.value)
    assert "fny_customers_own" not in str(caught.value)
