"""The reconciler against real PostgreSQL and a pool that does what the test says."""

from __future__ import annotations

import asyncio
from collections.abc import Callable

import psycopg
from sqlalchemy import text
from sqlalchemy.ext.asyncio import AsyncEngine

from finery_scheduler.core.types import Node, Placement
from finery_service.db.engine import transaction
from finery_service.reconcile import lease, loop
from finery_service.reconcile.context import Context
from finery_service.reconcile.snapshot import Pool, read, to_snapshot
from finery_service.rpc.tokens import attempt_token
from finery_testing import control, factories
from finery_testing.clock import FakeClock
from finery_testing.control import Worker, step
from finery_testing.pool import ScriptedPool
from finery_testing.postgres import Database
from finery_testing.reconciling import SETTINGS, a_job, audited, lead

pytest_plugins = ("finery_testing.control_fixtures",)


async def test_a_job_is_prepared_then_admitted_then_running(
    system_engine: AsyncEngine, pool: ScriptedPool, clock: FakeClock
) -> None:
    context = await lead(system_engine, pool, clock)
    job = await a_job(system_engine, clock, state="validating", accelerators=2)
    await loop.tick(context)
    [launch] = pool.launches
    assert (launch.placements, launch.entrypoint) == ((), "finery_gpu_workers.run:main")
    async with control.rpc(system_engine, SETTINGS, clock) as channel:
        [prepare] = await control.attempts(system_engine, job.id)
        preparing = Worker(channel, prepare)
        await preparing.begin()
        await preparing.prepared()
        await loop.tick(context)
        _, train = await control.attempts(system_engine, job.id)
        assert (train.kind, train.fence, train.state) == ("train", 2, "starting")
        assert train.launched_at is not None
        assert pool.launches[1].placements == (Placement("node-a", 2),)
        assert pool.stops == [prepare.id]
        training = Worker(channel, train)
        await training.begin()
        await training.commit(*[step(number) for number in range(1, 5)])
        await training.publish(4, final=True)
        await training.finish("completed")
        await loop.tick(context)
    assert (await control.job_row(system_engine, job.id)).state == "succeeded"
    assert pool.workers_ == {}
    assert all(attempt.cleaned_at for attempt in await control.attempts(system_engine, job.id))
    history = [event.data["to"] for event in await control.events(system_engine, job.id, "state")]
    assert history == ["queued", "starting", "running", "succeeded"]
    history = [e.data for e in await control.events(system_engine, job.id, "attempt")]
    assert [(data["kind"], data["number"], data["phase"]) for data in history] == [
        ("prepare", 1, "started"),
        ("prepare", 1, "ended"),
        ("train", 1, "started"),
        ("train", 1, "ended"),
    ]
    assert await audited(system_engine, pool) == []


async def test_the_launch_carries_what_the_worker_needs(
    system_engine: AsyncEngine, pool: ScriptedPool, clock: FakeClock
) -> None:
    context = await lead(system_engine, pool, clock)
    context.settings = SETTINGS.model_copy(update={"torch_threads": 2, "device": "cpu"})
    job = await a_job(system_engine, clock)
    await loop.tick(context)
    [attempt] = await control.attempts(system_engine, job.id)
    assert pool.launches[0].environment == {
        "FINERY_RPC_ADDRESS": "127.0.0.1:9",
        "FINERY_ATTEMPT_ID": attempt.id,
        "FINERY_FENCE": "1",
        "FINERY_ATTEMPT_TOKEN": attempt_token(control.SECRET, attempt.id, 1),
        "FINERY_STORE_URL": "file:///objects",
        "FINERY_MODEL_CACHE": str(SETTINGS.model_cache),
        "FINERY_DEVICE": "cpu",
        "FINERY_TORCH_THREADS": "2",
    }


async def test_every_waiting_job_has_a_reason_and_a_place_written_only_when_changed(
    system_engine: AsyncEngine, pool: ScriptedPool, clock: FakeClock
) -> None:
    context = await lead(system_engine, pool, clock)
    jobs = [await a_job(system_engine, clock, accelerators=accelerators) for accelerators in (3, 3, 1, 9)]
    await loop.tick(context)
    rows = [await control.job_row(system_engine, job.id) for job in jobs]
    assert [(row.state, row.reason, row.queue_position) for row in rows] == [
        ("starting", None, None),
        ("queued", "waiting_for_capacity", 1),
        ("queued", "waiting_behind", 2),
        ("queued", "exceeds_pool", 3),
    ]
    assert await control.events(system_engine, jobs[1].id) == []
    marks = "select string_agg(xmin::text, ',' order by id) from jobs"
    async with transaction(system_engine) as session:
        before = (await session.execute(text(marks))).scalar_one()
    await loop.tick(context)
    async with transaction(system_engine) as session:
        assert (await session.execute(text(marks))).scalar_one() == before


async def test_prepare_attempts_are_bounded_oldest_first(
    system_engine: AsyncEngine, pool: ScriptedPool, clock: FakeClock
) -> None:
    context = await lead(system_engine, pool, clock)
    jobs = [await a_job(system_engine, clock, state="validating") for _ in range(4)]
    for _ in range(2):
        await loop.tick(context)
    assert [len(await control.attempts(system_engine, job.id)) for job in jobs] == [1, 1, 0, 0]
    [first] = await control.attempts(system_engine, jobs[0].id)
    pool.workers_[first.id] = "dead"
    await loop.tick(context)  # it backs off, the next one gets the place
    row = await control.job_row(system_engine, jobs[0].id)
    assert (row.state, row.reason) == ("validating", "worker_lost")
    await loop.tick(context)
    assert [len(await control.attempts(system_engine, job.id)) for job in jobs] == [1, 1, 1, 0]


async def test_the_snapshot_counts_uncleaned_attempts_as_holders(
    system_engine: AsyncEngine, pool: ScriptedPool, clock: FakeClock
) -> None:
    job = await a_job(system_engine, clock)
    await factories.attempt(
        system_engine,
        job,
        now=clock(),
        state="ended",
        reason="worker_lost",
        ended_at=clock(),
        placements=[{"node": "node-a", "slots": 1}],
    )
    snapshot = to_snapshot(await read(system_engine), Pool(True, (Node("node-a", 4),), {}))
    assert [waiting.id for waiting in snapshot.waiting] == [job.id]
    [holder] = snapshot.running
    assert holder.placements == (Placement("node-a", 1),)


async def test_the_loop_survives_faults_and_lost_connections_and_stops_cleanly(
    database: Database, system_engine: AsyncEngine, pool: ScriptedPool, clock: FakeClock
) -> None:
    context = Context(system_engine, pool, SETTINGS, clock)
    stop = asyncio.Event()
    running = asyncio.create_task(loop.run(context, stop))
    pool.bugs = 2
    await a_job(system_engine, clock)
    await _until(lambda: len(pool.launches) == 1)
    assert pool.bugs == 0
    async with await psycopg.AsyncConnection.connect(database.admin_dsn, autocommit=True) as admin:
        cut = "select pg_terminate_backend(pid) from pg_stat_activity where usename = 'finery_system'"
        await admin.execute(cut)  # what a restart of the database looks like to its clients
    await a_job(system_engine, clock)
    await _until(lambda: len(pool.launches) == 2)
    stop.set()
    await asyncio.wait_for(running, 10)
    successor = await lease.acquire(system_engine, "next", 30)  # released: no waiting for the lease to run out
    assert successor is not None
    assert successor.epoch == 2


async def _until(condition: Callable[[], bool]) -> None:
    async with asyncio.timeout(20):
        while not condition():  # noqa: ASYNC110 - polls the loop under test
            await asyncio.sleep(0.01)
