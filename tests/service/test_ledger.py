"""Usage records and prices, against figures worked by hand."""

from __future__ import annotations

from datetime import UTC, datetime
from decimal import Decimal

import pytest
from sqlalchemy.ext.asyncio import AsyncEngine

from finery_service.db.engine import transaction
from finery_service.jobs.tables import AttemptRow, JobRow
from finery_service.usage import ledger, prices
from finery_service.usage.ledger import Record
from finery_testing import control, factories
from finery_testing.clock import FakeClock

BOOK = {"train.sft": Decimal("0.40"), "eval.sft": Decimal("0.10")}


async def _job(engine: AsyncEngine, clock: FakeClock) -> tuple[JobRow, AttemptRow]:
    job = await factories.job(engine, await factories.tenant(engine, now=clock()), now=clock(), state="running")
    return job, await factories.attempt(engine, job, now=clock())


def _records(*steps: int) -> list[Record]:
    return [Record("train.sft", f"step:{step}", step, 10 * step) for step in steps]


async def test_a_unit_of_work_is_recorded_once(system_engine: AsyncEngine, clock: FakeClock) -> None:
    job, attempt = await _job(system_engine, clock)
    async with transaction(system_engine) as session:
        assert await ledger.record(session, job, attempt.id, _records(1, 2), clock()) == _records(1, 2)
    async with transaction(system_engine) as session:
        assert await ledger.record(session, job, attempt.id, _records(2, 3), clock()) == _records(3)
        assert await ledger.record(session, job, attempt.id, [], clock()) == []
    assert [unit for unit, _, _ in await control.usage(system_engine, job.id)] == ["step:1", "step:2", "step:3"]


async def test_billable_stays_billable_and_void_makes_room_for_the_next_attempt(
    system_engine: AsyncEngine, clock: FakeClock
) -> None:
    job, attempt = await _job(system_engine, clock)
    async with transaction(system_engine) as session:
        await ledger.record(session, job, attempt.id, _records(1, 2, 3), clock())
        assert await ledger.make_billable(session, job.id, through_step=2) == 2
        assert await ledger.void(session, job.id, reason="worker_lost", after_step=2) == 1
        assert await ledger.void(session, job.id, reason="worker_lost", after_step=-1) == 0
        assert await ledger.totals(session, job.id) == {"train.sft": 30}
        assert await ledger.record(session, job, attempt.id, _records(3), clock()) == _records(3)
        assert await ledger.totals(session, job.id) == {"train.sft": 60}
    states = [(unit, state) for unit, state, _ in await control.usage(system_engine, job.id)]
    assert states == [("step:1", "billable"), ("step:2", "billable"), ("step:3", "void"), ("step:3", "provisional")]


async def test_one_jobs_usage_is_not_anothers(system_engine: AsyncEngine, clock: FakeClock) -> None:
    job, attempt = await _job(system_engine, clock)
    other, other_attempt = await _job(system_engine, clock)
    async with transaction(system_engine) as session:
        await ledger.record(session, job, attempt.id, _records(1), clock())
        await ledger.record(session, other, other_attempt.id, _records(1), clock())
        await ledger.make_billable(session, job.id, through_step=9)
        await ledger.void(session, job.id, reason="x", after_step=-1)
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
        assert await prices.pinned(session, "pb_default") == BOOK
        with pytest.raises(LookupError, match="effective by 2020"):
            await prices.in_force(session, datetime(2020, 1, 1, tzinfo=UTC))
