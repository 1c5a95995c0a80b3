"""Cancel and pause, in every state, whatever the pool does."""

from __future__ import annotations

import grpc
import pytest
from sqlalchemy.ext.asyncio import AsyncEngine

from finery.types.jobs import Intent
from finery_service.reconcile import loop
from finery_testing import control
from finery_testing.clock import FakeClock
from finery_testing.control import Worker, step
from finery_testing.pool import ScriptedPool
from finery_testing.reconciling import SETTINGS, a_job, intend, lead

pytest_plugins = ("finery_testing.control_fixtures",)


async def test_e10_cancel_between_decision_and_start_wins(
    system_engine: AsyncEngine, pool: ScriptedPool, clock: FakeClock
) -> None:
    context = await lead(system_engine, pool, clock)
    job = await a_job(system_engine, clock)
    await loop.tick(context)
    [attempt] = await control.attempts(system_engine, job.id)
    async with control.rpc(system_engine, SETTINGS, clock) as channel:
        await intend(system_engine, job.id, Intent.CANCEL)  # after the launch, before the worker's first call
        await loop.tick(context)
        with pytest.raises(grpc.aio.AioRpcError, match="has ended"):
            await Worker(channel, attempt).begin()
    row = await control.job_row(system_engine, job.id)
    assert (row.state, row.reason) == ("cancelled", "cancelled_by_customer")
    assert pool.workers_ == {}
    terminal = [e for e in await control.events(system_engine, job.id, "state") if e.data["to"] == "cancelled"]
    assert len(terminal) == 1
    await loop.tick(context)
    assert await control.job_row(system_engine, job.id) == row


async def test_e11_cancel_needs_no_worker_in_validating_queued_requeued_or_on_a_dead_node(
    system_engine: AsyncEngine, pool: ScriptedPool, clock: FakeClock
) -> None:
    context = await lead(system_engine, pool, clock)
    dead = await a_job(system_engine, clock)
    await loop.tick(context)
    [attempt] = await control.attempts(system_engine, dead.id)
    async with control.rpc(system_engine, SETTINGS, clock) as channel:
        await control.execute(system_engine, "update jobs set total_steps = 4")
        worker = Worker(channel, attempt)
        await worker.begin()
        await worker.commit(step(1))
    backing_off = {"not_before": clock.now.replace(year=2100), "reason": "worker_lost"}
    jobs = [
        await a_job(system_engine, clock, state="validating", total_steps=None),
        await a_job(system_engine, clock),
        await a_job(system_engine, clock, **backing_off),
    ]
    pool.reachable = False
    for job in (dead, *jobs):
        await intend(system_engine, job.id, Intent.CANCEL)
    await loop.tick(context)
    assert [(await control.job_row(system_engine, job.id)).state for job in jobs] == ["cancelled"] * 3
    assert (await control.job_row(system_engine, dead.id)).state == "running"  # it may still be there
    await control.expire_lease(system_engine, attempt.id)
    await loop.tick(context)
    assert (await control.job_row(system_engine, dead.id)).state == "cancelled"
    assert await control.usage(system_engine, dead.id) == [("step:1", "void", 100)]
    pool.reachable = True
    for _ in range(2):
        await loop.tick(context)
    assert pool.workers_ == {}
    assert len(await control.attempts(system_engine, dead.id)) == 1  # no later requeue


async def test_e11_a_worker_that_ignores_the_cancel_is_stopped_after_its_grace(
    system_engine: AsyncEngine, pool: ScriptedPool, clock: FakeClock
) -> None:
    context = await lead(system_engine, pool, clock)
    job = await a_job(system_engine, clock)
    await loop.tick(context)
    async with control.rpc(system_engine, SETTINGS, clock) as channel:
        [attempt] = await control.attempts(system_engine, job.id)
        await Worker(channel, attempt).begin()
    await intend(system_engine, job.id, Intent.CANCEL)
    await loop.tick(context)
    assert (await control.job_row(system_engine, job.id)).state == "running"
    late = "update jobs set intent_at = clock_timestamp() - interval '61 seconds'"
    await control.execute(system_engine, late)
    await loop.tick(context)
    assert (await control.job_row(system_engine, job.id)).state == "cancelled"
    assert pool.stops == [attempt.id]


async def test_pause_rests_the_job_and_run_queues_it_again(
    system_engine: AsyncEngine, pool: ScriptedPool, clock: FakeClock
) -> None:
    context = await lead(system_engine, pool, clock)
    job = await a_job(system_engine, clock, accelerators=9)
    await intend(system_engine, job.id, Intent.PAUSE)
    await loop.tick(context)
    await loop.tick(context)
    assert (await control.job_row(system_engine, job.id)).state == "paused"
    await intend(system_engine, job.id, Intent.RUN)
    await loop.tick(context)
    row = await control.job_row(system_engine, job.id)
    assert (row.state, row.reason) == ("queued", "exceeds_pool")
