"""Pause and resume against a worker that speaks the RPC, in every order."""

from __future__ import annotations

from dataclasses import dataclass

import grpc
import pytest
import pytest_asyncio
from sqlalchemy.ext.asyncio import AsyncEngine

from finery.types.jobs import Intent
from finery_protos.v1 import worker_pb2 as pb
from finery_scheduler.core.types import Node
from finery_service.reconcile import loop
from finery_service.reconcile.context import Context
from finery_testing import control
from finery_testing.clock import FakeClock
from finery_testing.control import Worker, step
from finery_testing.pool import ScriptedPool
from finery_testing.reconciling import SETTINGS, a_job, audited, intend, lead

pytest_plugins = ("finery_testing.control_fixtures",)


@dataclass
class Scene:
    """One slot, and one job of four steps that has it."""

    context: Context
    pool: ScriptedPool
    clock: FakeClock
    job: str

    async def tick(self, times: int = 1) -> None:
        for _ in range(times):
            await loop.tick(self.context)

    async def worker(self, channel: grpc.aio.Channel, *, begin: bool = True) -> Worker:
        """Of the latest attempt."""
        worker = Worker(channel, (await control.attempts(self.context.engine, self.job))[-1])
        if begin:
            await worker.begin()
        return worker

    async def intend(self, intent: Intent) -> None:
        await intend(self.context.engine, self.job, intent)

    async def state(self) -> tuple[str, str | None]:
        row = await control.job_row(self.context.engine, self.job)
        return row.state, row.reason

    async def history(self) -> list[str]:
        return [event.data["to"] for event in await control.events(self.context.engine, self.job, "state")]


@pytest_asyncio.fixture
async def scene(system_engine: AsyncEngine, pool: ScriptedPool, clock: FakeClock) -> Scene:
    pool.nodes_ = (Node("node-a", 1),)
    context = await lead(system_engine, pool, clock)
    job = await a_job(system_engine, clock, total_steps=4, prepared_prefix="p/")
    await loop.tick(context)
    return Scene(context, pool, clock, job.id)


async def test_a_pause_frees_the_slot_and_a_resume_goes_on_from_the_checkpoint(scene: Scene) -> None:
    engine = scene.context.engine
    other = await a_job(engine, scene.clock, total_steps=4, prepared_prefix="p/")
    async with control.rpc(engine, SETTINGS, scene.clock) as channel:
        worker = await scene.worker(channel)
        await worker.commit(step(1), step(2))
        await scene.intend(Intent.PAUSE)
        assert (await worker.heartbeat()).intent == pb.INTENT_PAUSE
        await worker.publish(2)
        await worker.finish("paused_by_customer")
        assert await scene.state() == ("paused", "paused_by_customer")
        await scene.tick(2)
        assert (await control.job_row(engine, other.id)).state == "starting", "it has the slot now"
        assert await scene.state() == ("paused", "paused_by_customer")
        await scene.intend(Intent.RUN)
        await scene.tick()
        assert await scene.state() == ("queued", "waiting_for_capacity")
        await intend(engine, other.id, Intent.CANCEL)
        await scene.tick(3)
        resumed = await scene.worker(channel, begin=False)
        assignment = await resumed.begin()
        assert (assignment.resume.step, assignment.orders.intent) == (2, pb.INTENT_RUN)
        await resumed.commit(step(3), step(4))
        await resumed.publish(4, final=True)
        await resumed.finish("completed")
    await scene.tick()
    assert await scene.history() == [
        *("starting", "running", "paused"),
        *("queued", "starting", "running", "succeeded"),
    ]
    assert await control.usage(engine, scene.job) == [(f"step:{n}", "billable", 100) for n in range(1, 5)]
    numbers = [event.data["number"] for event in await control.events(engine, scene.job, "attempt")]
    assert numbers == [1, 1, 2, 2]
    assert await audited(engine, scene.pool) == []


@pytest.mark.parametrize(
    ("intent", "history"),
    [(Intent.RUN, ["starting", "running", "queued"]), (Intent.CANCEL, ["starting", "running", "cancelled"])],
)
async def test_what_is_wanted_by_the_time_that_the_worker_has_paused_is_done(
    scene: Scene, intent: Intent, history: list[str]
) -> None:
    engine = scene.context.engine
    async with control.rpc(engine, SETTINGS, scene.clock) as channel:
        worker = await scene.worker(channel)
        await worker.commit(step(1))
        await scene.intend(Intent.PAUSE)
        assert (await worker.heartbeat()).intent == pb.INTENT_PAUSE
        await scene.intend(intent)
        await scene.tick()
        await worker.publish(1)
        await worker.finish("paused_by_customer")
    assert await scene.history() == history
    row = await control.job_row(engine, scene.job)
    assert (row.faults, row.not_before) == ({}, None), "nobody's fault, so it does not wait"
    assert await control.usage(engine, scene.job) == [("step:1", "billable", 100)]
    await scene.tick()
    assert len(await control.attempts(engine, scene.job)) == (2 if intent is Intent.RUN else 1)


async def test_nobody_pauses_a_job_unasked(scene: Scene) -> None:
    async with control.rpc(scene.context.engine, SETTINGS, scene.clock) as channel:
        worker = await scene.worker(channel)
        call = worker.finish("paused_by_customer")
        await control.refused(call, grpc.StatusCode.FAILED_PRECONDITION, "nobody asked")


async def test_a_pause_before_the_first_call_ends_the_attempt(scene: Scene) -> None:
    async with control.rpc(scene.context.engine, SETTINGS, scene.clock) as channel:
        worker = await scene.worker(channel, begin=False)
        await scene.intend(Intent.PAUSE)
        await scene.tick()
        await control.refused(worker.begin(), grpc.StatusCode.ABORTED, "has ended")
    assert await scene.state() == ("paused", "paused_by_customer")
    assert scene.pool.workers_ == {}
    await scene.intend(Intent.CANCEL)
    scene.pool.reachable = False
    await scene.tick()
    assert await scene.state() == ("cancelled", "cancelled_by_customer")


async def test_a_worker_that_dies_while_it_pauses_leaves_the_job_at_its_last_checkpoint(scene: Scene) -> None:
    engine = scene.context.engine
    async with control.rpc(engine, SETTINGS, scene.clock) as channel:
        worker = await scene.worker(channel)
        await worker.commit(step(1))
        await worker.publish(1)
        await worker.commit(step(2))
    await scene.intend(Intent.PAUSE)
    await scene.tick()
    assert await scene.state() == ("running", None), "within its grace"
    await control.expire_lease(engine, worker.attempt.id)
    await scene.tick()
    assert await scene.state() == ("paused", "paused_by_customer")
    assert await control.usage(engine, scene.job) == [("step:1", "billable", 100), ("step:2", "void", 100)]
    assert (await control.job_row(engine, scene.job)).step == 1


async def test_a_pause_while_the_data_is_prepared_takes_effect_before_a_slot_is_taken(
    system_engine: AsyncEngine, pool: ScriptedPool, clock: FakeClock
) -> None:
    context = await lead(system_engine, pool, clock)
    job = await a_job(system_engine, clock, state="validating")
    await intend(system_engine, job.id, Intent.PAUSE)
    await loop.tick(context)
    [attempt] = await control.attempts(system_engine, job.id)
    async with control.rpc(system_engine, SETTINGS, clock) as channel:
        preparing = Worker(channel, attempt)
        await preparing.begin()
        await loop.tick(context)
        await preparing.prepared()
    await loop.tick(context)
    row = await control.job_row(system_engine, job.id)
    assert (row.state, row.reason) == ("paused", "paused_by_customer")
    assert len(pool.launches) == 1
