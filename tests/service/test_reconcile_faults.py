"""Lost workers, pools that do not answer, clean-up that is owed."""

from __future__ import annotations

import asyncio
from collections import Counter

import pytest
from sqlalchemy.ext.asyncio import AsyncEngine

from finery.types.jobs import Intent
from finery_service.reconcile import apply, effects, lease, loop
from finery_service.reconcile.snapshot import Pool, read
from finery_testing import control, factories
from finery_testing.clock import FakeClock
from finery_testing.pool import ScriptedPool
from finery_testing.reconciling import a_job, audited, due_again, intend, lead

pytest_plugins = ("finery_testing.control_fixtures",)


async def test_f06_a_lost_worker_frees_its_slots_in_one_pass_and_the_job_is_in_one_state(
    system_engine: AsyncEngine, pool: ScriptedPool, clock: FakeClock
) -> None:
    context = await lead(system_engine, pool, clock)
    job = await a_job(system_engine, clock, accelerators=4)
    waiting = await a_job(system_engine, clock, accelerators=4)
    await loop.tick(context)
    [attempt] = await control.attempts(system_engine, job.id)
    assert await audited(system_engine, pool) == []
    pool.workers_[attempt.id] = "dead"
    await loop.tick(context)
    row = await control.job_row(system_engine, job.id)
    assert (row.state, row.reason, row.faults) == ("queued", "worker_lost", {"worker_lost": 1})
    assert (await control.job_row(system_engine, waiting.id)).state == "starting"
    assert pool.used() == Counter({"node-a": 4})
    assert await audited(system_engine, pool) == []


async def test_f06_the_audit_sees_what_is_wrong(
    system_engine: AsyncEngine, pool: ScriptedPool, clock: FakeClock
) -> None:
    job = await a_job(system_engine, clock, state="running", fence=2)
    held = [{"node": "node-a", "slots": 5}]
    attempt = await factories.attempt(system_engine, job, now=clock(), fence=1, placements=held)
    lonely = await a_job(system_engine, clock, state="starting")
    queued = await a_job(system_engine, clock, state="queued")
    admitted = await factories.attempt(
        system_engine, queued, now=clock(), fence=0, placements=[{"node": "node-b", "slots": 1}]
    )
    assert sorted(await audited(system_engine, pool)) == sorted(
        [
            f"live attempt {attempt.id} has fence 1, its job 2",
            f"attempt {attempt.id} holds 5 slots, its gang is 1",
            f"job {queued.id} is queued and has a live train attempt {admitted.id}",
            f"job {lonely.id} is starting without a live attempt",
            "node node-a: 5 slots held, 4 there",
            "node node-b: 1 slots held, 0 there",
        ]
    )


async def test_f07_a_job_that_never_becomes_ready_fails_after_five_attempts_without_ghosts(
    system_engine: AsyncEngine, pool: ScriptedPool, clock: FakeClock
) -> None:
    context = await lead(system_engine, pool, clock)
    job = await a_job(system_engine, clock, accelerators=2)
    for number in range(1, 6):
        await due_again(system_engine)
        await loop.tick(context)
        attempts = await control.attempts(system_engine, job.id)
        assert [attempt.state for attempt in attempts] == ["ended"] * (number - 1) + ["starting"]
        assert pool.used() == Counter({"node-a": 2})
        await control.expire_lease(system_engine, attempts[-1].id)
        await loop.tick(context)
    row = await control.job_row(system_engine, job.id)
    assert (row.state, row.reason, row.fence) == ("failed", "too_many_faults", 5)
    assert row.error is not None
    assert row.error["code"] == "too_many_faults"
    await loop.tick(context)
    assert len(await control.attempts(system_engine, job.id)) == 5
    assert pool.workers_ == {}
    assert await audited(system_engine, pool) == []


async def test_f07_a_launch_that_the_pool_refuses_counts_and_backs_off(
    system_engine: AsyncEngine, pool: ScriptedPool, clock: FakeClock
) -> None:
    context = await lead(system_engine, pool, clock)
    pool.refuses = True
    job = await a_job(system_engine, clock)
    await loop.tick(context)
    row = await control.job_row(system_engine, job.id)
    assert (row.state, row.reason, row.faults) == ("queued", "launch_failed", {"launch_failed": 1})
    await loop.tick(context)  # it backs off: not admitted again at once, and it keeps its reason
    row = await control.job_row(system_engine, job.id)
    assert (row.state, row.reason, row.fence) == ("queued", "launch_failed", 1)
    pool.refuses = False
    await due_again(system_engine)
    await loop.tick(context)
    assert (await control.job_row(system_engine, job.id)).state == "starting"


async def test_f13_clean_up_is_owed_until_the_pool_confirms_it_and_holds_the_slots(
    system_engine: AsyncEngine, pool: ScriptedPool, clock: FakeClock
) -> None:
    context = await lead(system_engine, pool, clock)
    job = await a_job(system_engine, clock, accelerators=4)
    await loop.tick(context)
    [attempt] = await control.attempts(system_engine, job.id)
    waiting = await a_job(system_engine, clock, accelerators=4)
    pool.workers_[attempt.id] = "dead"
    pool.stops_to_fail = 6
    for failures in range(1, 7):
        if failures == 4:  # the obligation outlives the reconciler
            assert context.leadership is not None
            await lease.release(system_engine, context.leadership)
            context = await lead(system_engine, pool, clock, holder="two")
        await loop.tick(context)
        assert len(pool.stops) == failures
        assert (await control.attempts(system_engine, job.id))[0].cleaned_at is None
        assert (await control.job_row(system_engine, waiting.id)).state == "queued"
        await loop.tick(context)  # backing off: not asked again at once
        assert len(pool.stops) == failures
        clock.advance(60)
    await loop.tick(context)
    assert (await control.attempts(system_engine, job.id))[0].cleaned_at is not None
    assert (await control.job_row(system_engine, waiting.id)).state == "starting"
    assert pool.used() == Counter({"node-a": 4})


async def test_f13_workers_that_the_database_does_not_know_are_stopped(
    system_engine: AsyncEngine, pool: ScriptedPool, clock: FakeClock
) -> None:
    context = await lead(system_engine, pool, clock)
    pool.workers_["att_orphan"] = "alive"
    job = await a_job(system_engine, clock)
    await loop.tick(context)
    [attempt] = await control.attempts(system_engine, job.id)
    assert pool.workers_ == {attempt.id: "alive"}


async def test_cannot_reach_is_not_dead(system_engine: AsyncEngine, pool: ScriptedPool, clock: FakeClock) -> None:
    context = await lead(system_engine, pool, clock)
    running = await a_job(system_engine, clock)
    await loop.tick(context)
    queued = await a_job(system_engine, clock)
    validating = await a_job(system_engine, clock, state="validating")
    await control.execute(system_engine, "update attempts set launched_at = now() - interval '1 hour'")
    pool.reachable = False
    await loop.tick(context)
    assert (await control.job_row(system_engine, running.id)).state == "starting"
    for job in (queued, validating):
        row = await control.job_row(system_engine, job.id)
        assert (row.state, row.reason) == (job.state, "pool_unreachable")
    [attempt] = await control.attempts(system_engine, running.id)
    await control.expire_lease(system_engine, attempt.id)
    await loop.tick(context)
    assert (await control.job_row(system_engine, running.id)).state == "queued"
    pool.reachable = True
    await due_again(system_engine)
    await loop.tick(context)
    for job in (running, queued):
        assert (await control.job_row(system_engine, job.id)).state == "starting"
    assert (await control.job_row(system_engine, validating.id)).reason == "waiting_for_validation"
    assert attempt.id not in pool.workers_  # the one that was expired meanwhile is stopped, not adopted


async def test_a_restarted_reconciler_disturbs_no_healthy_attempt(
    system_engine: AsyncEngine, pool: ScriptedPool, clock: FakeClock
) -> None:
    context = await lead(system_engine, pool, clock)
    confirmed, unconfirmed = await a_job(system_engine, clock), await a_job(system_engine, clock)
    await loop.tick(context)
    forget = "update attempts set launched_at = null where job_id = :job"  # killed between launch and its record
    await control.execute(system_engine, forget, job=unconfirmed.id)
    assert context.leadership is not None
    await lease.release(system_engine, context.leadership)
    successor = await lead(system_engine, pool, clock, holder="two")
    await loop.tick(successor)
    assert (len(pool.launches), pool.stops) == (2, [])
    for job in (confirmed, unconfirmed):
        [attempt] = await control.attempts(system_engine, job.id)
        assert (attempt.state, attempt.launched_at is None) == ("starting", False)


async def test_a_lease_renewed_after_the_snapshot_is_not_expired(
    system_engine: AsyncEngine, pool: ScriptedPool, clock: FakeClock
) -> None:
    context = await lead(system_engine, pool, clock)
    job = await a_job(system_engine, clock)
    await loop.tick(context)
    [attempt] = await control.attempts(system_engine, job.id)
    await control.expire_lease(system_engine, attempt.id)
    view = await read(system_engine)
    renewed = "update attempts set lease_expires_at = clock_timestamp() + interval '15 seconds'"
    await control.execute(system_engine, renewed)
    assert not await apply.lifecycle(context, view, Pool(True, pool.nodes_, {attempt.id: "alive"}))
    assert (await control.job_row(system_engine, job.id)).state == "starting"


async def test_a_pool_that_hangs_does_not_hold_up_leases_and_cancellations(
    system_engine: AsyncEngine, pool: ScriptedPool, clock: FakeClock, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("finery_service.reconcile.context._SLOW_POOL", 0.05)
    context = await lead(system_engine, pool, clock)
    lost, cancelled = await a_job(system_engine, clock), await a_job(system_engine, clock)
    await loop.tick(context)
    [attempt] = await control.attempts(system_engine, lost.id)
    pool.hangs = asyncio.Event()
    await control.expire_lease(system_engine, attempt.id)
    await intend(system_engine, cancelled.id, Intent.CANCEL)
    await loop.tick(context)
    assert (await control.job_row(system_engine, lost.id)).state == "queued"
    assert (await control.job_row(system_engine, cancelled.id)).state == "cancelled"
    assert len(pool.workers_) == 2
    pool.hangs.set()
    await context.observing  # type: ignore[misc]
    await loop.tick(context)
    assert pool.workers_ == {}


async def test_e11_a_slow_launch_or_stop_of_one_job_holds_up_no_other(
    system_engine: AsyncEngine, pool: ScriptedPool, clock: FakeClock, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(effects, "_MOMENT", 0.05)
    context = await lead(system_engine, pool, clock)
    slow = await a_job(system_engine, clock)
    pool.launching, pool.stopping = asyncio.Event(), asyncio.Event()
    async with asyncio.timeout(20):
        await loop.tick(context)
        other = await a_job(system_engine, clock, accelerators=4)
        await intend(system_engine, other.id, Intent.CANCEL)
        await loop.tick(context)
        assert (await control.job_row(system_engine, other.id)).state == "cancelled"
        assert (await control.job_row(system_engine, slow.id)).state == "starting"
        assert pool.launches == []
        pool.launching.set()
        await loop.tick(context)
        assert len(pool.launches) == 1, "begun once, however many passes went by"
        [attempt] = await control.attempts(system_engine, slow.id)
        assert attempt.launched_at is not None
        await intend(system_engine, slow.id, Intent.CANCEL)
        await loop.tick(context)
        await loop.tick(context)
        [attempt] = await control.attempts(system_engine, slow.id)
        assert (pool.stops, attempt.cleaned_at) == ([attempt.id], None)
        pool.stopping.set()
        await loop.tick(context)
    [attempt] = await control.attempts(system_engine, slow.id)
    assert attempt.cleaned_at is not None
    assert (pool.stops, pool.workers_) == ([attempt.id], {})


async def test_one_job_that_cannot_be_moved_holds_up_no_other(
    system_engine: AsyncEngine, pool: ScriptedPool, clock: FakeClock
) -> None:
    context = await lead(system_engine, pool, clock)
    broken = [await a_job(system_engine, clock, state=state) for state in ("queued", "validating")]
    await control.execute(system_engine, "delete from job_heads")  # no event of theirs can be written
    doomed, waiting = await a_job(system_engine, clock), await a_job(system_engine, clock)
    await intend(system_engine, broken[0].id, Intent.CANCEL)
    await intend(system_engine, doomed.id, Intent.CANCEL)
    await loop.tick(context)
    assert (await control.job_row(system_engine, doomed.id)).state == "cancelled"
    assert (await control.job_row(system_engine, waiting.id)).state == "starting"
    assert [(await control.job_row(system_engine, job.id)).state for job in broken] == ["queued", "validating"]
