"""Usage records and prices, against figures worked by hand."""

from __future__ import annotations

from datetime import UTC, datetime
from decimal import Decimal

import pytest
from sqlalchemy.ext.asyncio import AsyncEngine
from sqlmodel.ext.asyncio.session import AsyncSession

from finery.types.usage import Sku
from finery_service.db.engine import transaction
from finery_service.jobs import store
from finery_service.jobs.tables import AttemptRow, JobRow
from finery_service.reconcile import audit
from finery_service.usage import ledger, prices
from finery_service.usage.ledger import Record
from finery_testing import control, factories
from finery_testing.clock import FakeClock
from finery_testing.control import Worker

pytest_plugins = ["finery_testing.control_fixtures"]

BOOK = {"train.sft": Decimal("0.40"), "eval.sft": Decimal("0.10")}


async def _job(engine: AsyncEngine, clock: FakeClock) -> tuple[JobRow, AttemptRow]:
    job = await factories.job(engine, await factories.tenant(engine, now=clock()), now=clock(), state="running")
    return job, await factories.attempt(engine, job, now=clock())


async def _locked(session: AsyncSession, job: JobRow) -> JobRow:
    locked = await store.lock(session, job.id)
    assert locked is not None
    return locked


def _records(*steps: int) -> list[Record]:
    return [Record("train.sft", f"step:{step}", step, 10 * step) for step in steps]


async def test_a_unit_of_work_is_recorded_once(system_engine: AsyncEngine, clock: FakeClock) -> None:
    job, attempt = await _job(system_engine, clock)
    async with transaction(system_engine) as session:
        locked = await _locked(session, job)
        assert await ledger.record(session, locked, attempt.id, _records(1, 2), clock()) == _records(1, 2)
    async with transaction(system_engine) as session:
        job = await _locked(session, job)
        assert await ledger.record(session, job, attempt.id, _records(2, 3), clock()) == _records(3)
        assert await ledger.record(session, job, attempt.id, [], clock()) == []
    assert [unit for unit, _, _ in await control.usage(system_engine, job.id)] == ["step:1", "step:2", "step:3"]
    assert (await control.job_row(system_engine, job.id)).usage == {"train.sft": 60}


async def test_billable_stays_billable_and_void_makes_room_for_the_next_attempt(
    system_engine: AsyncEngine, clock: FakeClock
) -> None:
    job, attempt = await _job(system_engine, clock)
    async with transaction(system_engine) as session:
        job = await _locked(session, job)
        await ledger.record(session, job, attempt.id, [*_records(1, 2, 3), Record("eval.sft", "eval:3", 3, 7)], clock())
        assert await ledger.make_billable(session, job.id, through_step=2) == 2
        assert job.usage == {"train.sft": 60, "eval.sft": 7}
        assert await ledger.void(session, job, reason="worker_lost", after_step=2) == 2
        assert await ledger.void(session, job, reason="worker_lost", after_step=-1) == 0
        assert job.usage == {"train.sft": 30}
        assert await ledger.record(session, job, attempt.id, _records(3), clock()) == _records(3)
        assert job.usage == {"train.sft": 60}
    assert (await control.job_row(system_engine, job.id)).usage == {"train.sft": 60}
    states = [(unit, state) for unit, state, _ in await control.usage(system_engine, job.id) if unit != "eval:3"]
    assert states == [("step:1", "billable"), ("step:2", "billable"), ("step:3", "void"), ("step:3", "provisional")]


async def test_the_audit_finds_sums_that_are_not_those_of_the_records(
    system_engine: AsyncEngine, clock: FakeClock
) -> None:
    job, attempt = await _job(system_engine, clock)
    async with transaction(system_engine) as session:
        await ledger.record(session, await _locked(session, job), attempt.id, _records(1, 2), clock())
        assert not [line for line in await audit.differences(session) if "usage" in line]
    await control.execute(system_engine, "update usage_records set quantity = quantity + 1 where unit = 'step\\:2'")
    async with transaction(system_engine) as session:
        (found,) = [line for line in await audit.differences(session) if "usage" in line]
    assert job.id in found
    assert "{'train.sft': 30}" in found
    assert "{'train.sft': 31}" in found


async def test_a_commit_reads_no_record_of_the_steps_before(
    system_engine: AsyncEngine, clock: FakeClock, worker: Worker
) -> None:
    """What a commit costs does not grow with the job: its records can all be gone, the cost so far is still right."""
    await worker.begin()
    await worker.commit(control.step(1, 1000), control.step(2, 500))
    await control.execute(system_engine, "delete from usage_records")
    await worker.commit(control.step(3, 250))
    costs = [event.data["cost"] for event in await control.events(system_engine, worker.attempt.job_id, "metric")]
    assert costs == ["0.0004", "0.0006", "0.0007"]


async def test_one_jobs_usage_is_not_anothers(system_engine: AsyncEngine, clock: FakeClock) -> None:
    job, attempt = await _job(system_engine, clock)
    other, other_attempt = await _job(system_engine, clock)
    async with transaction(system_engine) as session:
        job, other = await _locked(session, job), await _locked(session, other)
        await ledger.record(session, job, attempt.id, _records(1), clock())
        await ledger.record(session, other, other_attempt.id, _records(1), clock())
        await ledger.make_billable(session, job.id, through_step=0)
        await ledger.void(session, job, reason="x", after_step=-1)
    assert (job.usage, other.usage) == ({}, {"train.sft": 10})
    assert [state for _, state, _ in await control.usage(system_engine, other.id)] == ["provisional"]


def test_g09_each_sku_is_rounded_once_over_its_total() -> None:
    # F-PRICE: 0.40 USD per million. 1,234,567 x 400 nano-dollars = 493,826,800.
    assert prices.cost_nanodollars({"train.sft": 1_234_567}, BOOK) == 493_826_800
    assert prices.cost_usd({"train.sft": 1_234_567}, BOOK) == Decimal("0.4938268")
    assert prices.cost_nanodollars({"train.sft": 1, "eval.sft": 1}, BOOK) == 500
    assert prices.cost_nanodollars({}, BOOK) == 0
    # Half-even on half a nano-dollar: 0.0005 USD per million is half a nano-dollar a unit.
    assert [prices.cost_nanodollars({"s": n}, {"s": "0.0005"}) for n in (1, 2, 3, 5)] == [0, 1, 2, 2]


def test_a_sku_without_a_price_is_an_error_that_names_it() -> None:
    with pytest.raises(ValueError, match=r"none of rollout\.generated"):
        prices.cost_nanodollars({"rollout.generated": 1}, BOOK)


async def test_the_book_in_force_is_the_latest_effective_one(system_engine: AsyncEngine) -> None:
    new = "insert into price_books values ('pb_new', '2027-01-01T00:00:00Z', '{\"train.sft\": \"0.50\"}')"
    await control.execute(system_engine, new.replace(":00", "\\:00"))
    async with transaction(system_engine) as session:
        before = await prices.in_force(session, datetime(2026, 12, 31, 23, 59, 59, tzinfo=UTC))
        after = await prices.in_force(session, datetime(2027, 1, 1, tzinfo=UTC))
        assert (before.id, after.id) == ("pb_default", "pb_new")
        pinned = await prices.pinned(session, "pb_default")
        assert pinned.items() >= BOOK.items()
        assert set(pinned) == set(Sku), "everything that is metered has its price"
        with pytest.raises(LookupError, match="effective by 2020"):
            await prices.in_force(session, datetime(2020, 1, 1, tzinfo=UTC))
