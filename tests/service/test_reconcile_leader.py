"""One leader at a time: stale decisions change nothing."""

from __future__ import annotations

import asyncio

import pytest
from sqlalchemy.ext.asyncio import AsyncEngine

from finery.types.jobs import Intent
from finery_scheduler.core.types import Admission, Placement, Plan
from finery_service.reconcile import apply, lease, loop
from finery_testing import control
from finery_testing.clock import FakeClock
from finery_testing.pool import ScriptedPool
from finery_testing.reconciling import a_job, intend, lead

pytest_plugins = ("finery_testing.control_fixtures",)


async def test_a_stale_leader_changes_nothing(system_engine: AsyncEngine, pool: ScriptedPool, clock: FakeClock) -> None:
    old = await lead(system_engine, pool, clock)
    assert await lease.acquire(system_engine, "two", 30) is None
    await control.execute(system_engine, "update leases set expires_at = now() - interval '1 second'")
    job = await a_job(system_engine, clock)
    with pytest.raises(lease.StaleLeaderError):  # its lease ran out, nobody took over yet
        await loop.tick(old)
    new = await lead(system_engine, pool, clock, holder="two")
    assert new.leadership == lease.Leadership("two", 2)
    with pytest.raises(lease.StaleLeaderError):
        await loop.tick(old)
    assert (await control.job_row(system_engine, job.id)).state == "queued"
    assert pool.launches == []
    await loop.tick(new)
    assert (await control.job_row(system_engine, job.id)).state == "starting"


async def test_no_successor_takes_over_while_a_guarded_transaction_is_open(
    system_engine: AsyncEngine, pool: ScriptedPool, clock: FakeClock
) -> None:
    context = await lead(system_engine, pool, clock)
    async with context.apply():
        await asyncio.sleep(0)
        taking = asyncio.create_task(lease.acquire(system_engine, "two", 30))
        done, _ = await asyncio.wait([taking], timeout=0.2)
        assert not done
    assert await taking is None


async def test_a_decision_on_an_older_version_is_dropped(
    system_engine: AsyncEngine, pool: ScriptedPool, clock: FakeClock
) -> None:
    context = await lead(system_engine, pool, clock)
    job = await a_job(system_engine, clock)
    stale = Plan((Admission(job.id, job.version, (Placement("node-a", 1),)),), ())
    await intend(system_engine, job.id, Intent.PAUSE)
    await intend(system_engine, job.id, Intent.RUN)
    assert not await apply.admit(context, stale)
    assert await control.attempts(system_engine, job.id) == []
