"""Previews among jobs: whose turn it is, and when they go."""

from __future__ import annotations

from datetime import timedelta

import pytest
from sqlalchemy import text
from sqlalchemy.ext.asyncio import AsyncEngine

from finery_service.db.engine import transaction
from finery_service.jobs.tables import JobRow
from finery_service.previews import store
from finery_service.reconcile import loop
from finery_service.reconcile.context import Context
from finery_testing import control, factories
from finery_testing.clock import FakeClock
from finery_testing.pool import ScriptedPool
from finery_testing.reconciling import SETTINGS, a_job, audited, lead

pytest_plugins = ("finery_testing.control_fixtures",)


async def a_preview(engine: AsyncEngine, clock: FakeClock, **values: object) -> JobRow:
    defaults: dict[str, object] = {"kind": "preview", "state": "validating", "preview": {"request": {}}}
    return await a_job(engine, clock, **{**defaults, **values})


async def preparing(context: Context, *jobs: JobRow) -> list[int]:
    """Attempts of each after two passes."""
    for _ in range(2):
        await loop.tick(context)
    return [len(await control.attempts(context.engine, job.id)) for job in jobs]


@pytest.mark.parametrize(("places", "started"), [(3, [1, 0, 1, 1, 0]), (2, [1, 0, 1, 0, 0]), (1, [1, 0, 0, 0, 0])])
async def test_previews_go_first_and_leave_jobs_a_place(
    system_engine: AsyncEngine, pool: ScriptedPool, clock: FakeClock, places: int, started: list[int]
) -> None:
    context = await lead(system_engine, pool, clock)
    context.settings = SETTINGS.model_copy(update={"prepare_attempts": places})
    jobs = [await a_job(system_engine, clock, state="validating") for _ in range(2)]
    previews = [await a_preview(system_engine, clock) for _ in range(3)]
    assert await preparing(context, *jobs, *previews) == started
    assert await audited(system_engine, pool) == []


async def test_tenants_take_turns_at_what_is_awaited(
    system_engine: AsyncEngine, pool: ScriptedPool, clock: FakeClock
) -> None:
    """Twenty runs that take a quarter of an hour each hold up nobody else's for five hours."""
    context = await lead(system_engine, pool, clock)
    context.settings = SETTINGS.model_copy(update={"prepare_attempts": 2})
    tenants = [await factories.tenant(system_engine, now=clock()) for _ in range(3)]
    many, later, last = [
        [await factories.job(system_engine, tenant, now=clock.advance(1), kind="run", method="rl", state="validating",
                             run={"request": {}}) for _ in range(count)]
        for tenant, count in zip(tenants, (3, 2, 1), strict=True)
    ]  # fmt: skip
    order = []
    for _ in range(6):
        await loop.tick(context)
        [running] = await query(system_engine, "select job_id from attempts where state <> 'ended'")
        order.append(running)
        await control.execute(
            system_engine, "update attempts set state = 'ended', ended_at = now(), reason = 'completed'"
        )
        finish = "update jobs set state = 'succeeded', finished_at = created_at where id = :id"
        await control.execute(system_engine, finish, id=running)
    assert order == [job.id for job in (many[0], later[0], last[0], many[1], later[1], many[2])]


async def test_a_lost_preview_is_tried_again_and_waits_with_a_reason(
    system_engine: AsyncEngine, pool: ScriptedPool, clock: FakeClock
) -> None:
    context = await lead(system_engine, pool, clock)
    preview = await a_preview(system_engine, clock)
    await loop.tick(context)
    [attempt] = await control.attempts(system_engine, preview.id)
    pool.workers_[attempt.id] = "dead"
    await loop.tick(context)
    row = await control.job_row(system_engine, preview.id)
    assert (row.state, row.reason, row.faults) == ("validating", "worker_lost", {"worker_lost": 1})


async def test_old_previews_are_forgotten_with_all_that_belongs_to_them(
    system_engine: AsyncEngine, pool: ScriptedPool, clock: FakeClock
) -> None:
    context = await lead(system_engine, pool, clock)
    done = {"state": "succeeded", "finished_at": clock.now + timedelta(minutes=1)}
    forgotten = await a_preview(system_engine, clock)
    await loop.tick(context)
    await control.execute(system_engine, "update attempts set state = 'ended', ended_at = now(), reason = 'completed'")
    finish = "update jobs set state = 'succeeded', finished_at = created_at where id = :id"
    await control.execute(system_engine, finish, id=forgotten.id)
    running = await a_preview(system_engine, clock)
    job = await a_job(system_engine, clock, **done)
    clock.advance(store.KEPT.total_seconds())
    young = await a_preview(system_engine, clock, state="succeeded", finished_at=clock.now + timedelta(minutes=1))
    await loop.keep_house(context)
    left = "select string_agg(id, ',' order by id) from jobs"
    assert await one(system_engine, left) == ids(forgotten, running, job, young), "its worker may still be there"
    await loop.tick(context)
    await loop.keep_house(context)
    assert await one(system_engine, left) == ids(running, job, young)
    for table in ("events", "job_heads", "attempts"):
        assert await one(system_engine, f"select count(*) from {table} where job_id = '{forgotten.id}'") == 0


def ids(*jobs: JobRow) -> str:
    return ",".join(sorted(job.id for job in jobs))


async def query(engine: AsyncEngine, statement: str) -> list[object]:
    async with transaction(engine) as session:
        return list((await session.execute(text(statement))).scalars())


async def one(engine: AsyncEngine, query: str) -> object:
    async with transaction(engine) as session:
        return (await session.execute(text(query))).scalar_one()
