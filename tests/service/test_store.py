"""Jobs in the database: compare-and-set moves and a gapless history."""

from __future__ import annotations

import asyncio
import contextlib
from datetime import timedelta

import pytest
from sqlalchemy.ext.asyncio import AsyncEngine

from finery.types.errors import ErrorDetail
from finery.types.jobs import Intent, JobState
from finery.types.reasons import JobReason
from finery_service.clock import Clock
from finery_service.db.engine import transaction
from finery_service.jobs import store
from finery_service.jobs.tables import JobRow
from finery_testing import control, factories
from finery_testing.clock import FakeClock


async def _move(engine: AsyncEngine, job: str, to: JobState, clock: Clock, **values: object) -> bool:
    reason = JobReason.CANCELLED_BY_CUSTOMER if to is JobState.CANCELLED else None
    async with transaction(engine) as session:
        return await store.move(session, job, to=to, reason=reason, now=clock(), **values)  # type: ignore[arg-type]


async def test_insert_writes_row_head_and_first_event_as_the_application(
    app_engine: AsyncEngine, system_engine: AsyncEngine, clock: FakeClock
) -> None:
    tenant = await factories.tenant(system_engine, now=clock())
    template = await factories.job(system_engine, tenant, now=clock())
    values = {**template.model_dump(), "id": "job_new", "state": "queued"}
    async with transaction(app_engine, tenant.id) as session:
        await store.insert(session, JobRow(**values), clock())
    row = await control.job_row(system_engine, "job_new")
    assert (row.state, row.reason) == ("validating", "waiting_for_validation")
    [event] = await control.events(system_engine, "job_new")
    assert (event.seq, event.type, event.data["from"], event.data["to"]) == (1, "state", None, "validating")
    assert event.data["message"] == "The training data is being prepared."


async def test_move_writes_state_and_event_together_and_grows_the_version(
    system_engine: AsyncEngine, clock: FakeClock
) -> None:
    job = await factories.job(system_engine, await factories.tenant(system_engine, now=clock()), now=clock())
    assert await _move(system_engine, job.id, JobState.STARTING, clock, expect_version=1)
    row = await control.job_row(system_engine, job.id)
    assert (row.state, row.version) == ("starting", 2)
    assert [event.data["to"] for event in await control.events(system_engine, job.id)] == ["starting"]
    assert not await _move(system_engine, job.id, JobState.RUNNING, clock, expect_version=1)
    assert not await _move(system_engine, job.id, JobState.PAUSED, clock, expect_version=7)
    assert not await _move(system_engine, "job_unknown", JobState.RUNNING, clock)
    assert len(await control.events(system_engine, job.id)) == 1


async def test_a_move_that_is_rolled_back_leaves_no_event(system_engine: AsyncEngine, clock: FakeClock) -> None:
    job = await factories.job(system_engine, await factories.tenant(system_engine, now=clock()), now=clock())
    with contextlib.suppress(ZeroDivisionError):
        async with transaction(system_engine) as session:
            assert await store.move(session, job.id, to=JobState.STARTING, reason=None, now=clock())
            raise ZeroDivisionError
    assert (await control.job_row(system_engine, job.id)).state == "queued"
    assert await control.events(system_engine, job.id) == []


@pytest.mark.parametrize("state", ["succeeded", "failed", "cancelled"])
async def test_e10_a_terminal_job_never_moves_again(system_engine: AsyncEngine, clock: FakeClock, state: str) -> None:
    tenant = await factories.tenant(system_engine, now=clock())
    job = await factories.job(system_engine, tenant, now=clock(), state=state)
    for to in JobState:
        assert not await _move(system_engine, job.id, to, clock)
    async with transaction(system_engine) as session:
        row = await store.set_intent(session, job.id, Intent.CANCEL)
        assert row is not None
        assert (row.state, row.intent, row.version) == (state, "run", 1)
    assert await control.events(system_engine, job.id) == []


async def test_e10_two_racing_endings_leave_exactly_one_terminal_event(
    system_engine: AsyncEngine, clock: FakeClock
) -> None:
    tenant = await factories.tenant(system_engine, now=clock())
    for _ in range(10):
        job = await factories.job(system_engine, tenant, now=clock(), state="running")
        ends = (JobState.SUCCEEDED, JobState.CANCELLED, JobState.FAILED)
        won = await asyncio.gather(*(_move(system_engine, job.id, end, clock) for end in ends))
        assert sorted(won) == [False, False, True]
        [event] = await control.events(system_engine, job.id)
        assert event.data["to"] == (await control.job_row(system_engine, job.id)).state


async def test_a_failed_job_carries_its_error_in_row_and_event(system_engine: AsyncEngine, clock: FakeClock) -> None:
    tenant = await factories.tenant(system_engine, now=clock())
    job = await factories.job(system_engine, tenant, now=clock(), state="running")
    error = ErrorDetail(message="line 3", type="invalid_request_error", code="invalid_data")
    assert await _move(system_engine, job.id, JobState.FAILED, clock, error=error)
    row = await control.job_row(system_engine, job.id)
    expected = {"message": "line 3", "type": "invalid_request_error", "code": "invalid_data"}
    assert row.error == expected
    assert row.finished_at == clock()
    assert (await control.events(system_engine, job.id))[0].data["error"] == expected


async def test_a_job_starts_when_it_first_runs_and_keeps_that_time_over_a_fault(
    system_engine: AsyncEngine, clock: FakeClock
) -> None:
    tenant = await factories.tenant(system_engine, now=clock())
    job = await factories.job(system_engine, tenant, now=clock(), state="starting")
    assert (await control.job_row(system_engine, job.id)).started_at is None
    clock.advance(5)
    first = clock()
    for state in (JobState.RUNNING, JobState.QUEUED, JobState.STARTING, JobState.RUNNING):
        assert await _move(system_engine, job.id, state, clock)
        assert (await control.job_row(system_engine, job.id)).started_at == first
        clock.advance(60)


async def test_e18_a_job_never_ends_before_it_started_whatever_the_clocks_of_the_machines_say(
    system_engine: AsyncEngine, clock: FakeClock
) -> None:
    tenant = await factories.tenant(system_engine, now=clock())
    behind = clock() - timedelta(seconds=120)
    job = await factories.job(system_engine, tenant, now=clock() - timedelta(seconds=60), state="running")
    await control.execute(system_engine, "update jobs set started_at = :now", now=clock())
    assert await _move(system_engine, job.id, JobState.SUCCEEDED, lambda: behind)
    row = await control.job_row(system_engine, job.id)
    assert row.started_at is not None
    assert row.created_at < row.started_at == row.finished_at == clock()
    waiting = await factories.job(system_engine, tenant, now=clock(), state="validating")
    assert await _move(system_engine, waiting.id, JobState.QUEUED, lambda: behind)
    assert (await control.job_row(system_engine, waiting.id)).queued_at == clock()


async def test_set_intent_notes_the_time_once_and_cancel_cannot_be_withdrawn(
    system_engine: AsyncEngine, clock: FakeClock
) -> None:
    job = await factories.job(system_engine, await factories.tenant(system_engine, now=clock()), now=clock())
    for intent in (Intent.CANCEL, Intent.CANCEL, Intent.RUN):
        async with transaction(system_engine) as session:
            await store.set_intent(session, job.id, intent)
    row = await control.job_row(system_engine, job.id)
    assert (row.intent, row.version) == ("cancel", 2)
    assert row.intent_at is not None


async def test_concurrent_writers_produce_a_gapless_history(system_engine: AsyncEngine, clock: FakeClock) -> None:
    job = await factories.job(system_engine, await factories.tenant(system_engine, now=clock()), now=clock())

    async def write(writer: int) -> None:
        for number in range(10):
            async with transaction(system_engine) as session:
                batch = [("warning", {"writer": writer, "number": number, "part": part}) for part in (0, 1)]
                await store.append_events(
                    session,
                    tenant=job.tenant_id,
                    job=job.id,
                    events=batch,  # type: ignore[arg-type]
                    now=clock(),
                )

    await asyncio.gather(*(write(writer) for writer in range(4)))
    history = await control.events(system_engine, job.id)
    assert [event.seq for event in history] == list(range(1, 81))
    for writer in range(4):  # each writer's own order is kept, batches stay together
        own = [(event.data["number"], event.data["part"]) for event in history if event.data["writer"] == writer]
        assert own == [(number, part) for number in range(10) for part in (0, 1)]
    parts = [(event.data["writer"], event.data["number"]) for event in history]
    assert parts[::2] == parts[1::2]


async def test_events_need_a_head(system_engine: AsyncEngine, clock: FakeClock) -> None:
    with pytest.raises(LookupError, match="head row of job job_none"):
        async with transaction(system_engine) as session:
            await store.append_event(session, tenant="ten_x", job="job_none", type="warning", data={}, now=clock())
