from __future__ import annotations

import itertools
from datetime import UTC, datetime, timedelta
from decimal import Decimal
from typing import Any

import pytest

from finery_service.db.tables import PriceBookRow, UsageRecordRow
from finery_service.usage.service import grouped
from finery_service.usage.store import Bucket
from finery_testing import control, factories
from finery_testing.api import Api, Door

MIDNIGHT = datetime(2026, 12, 2, tzinfo=UTC)


async def job(api: Api, door: Door, **values: Any) -> tuple[Any, str]:
    row = await factories.job(api.system_engine, door.tenant, now=api.clock(), state="running", **values)
    return row, (await factories.attempt(api.system_engine, row, now=api.clock())).id


async def record(
    api: Api,
    made: tuple[Any, str],
    unit: str,
    quantity: int,
    at: datetime,
    *,
    sku: str = "train.sft",
    state: str = "billable",
) -> None:
    row, attempt_id = made
    await factories.insert(
        api.system_engine,
        UsageRecordRow(
            tenant_id=row.tenant_id,
            project_id=row.project_id,
            job_id=row.id,
            attempt_id=attempt_id,
            sku=sku,
            unit=unit,
            step=1,
            quantity=quantity,
            state=state,
            void_reason="worker_lost" if state == "void" else None,
            created_at=at,
        ),
    )


async def usage(door: Door, **parameters: Any) -> list[dict[str, Any]]:
    answer = await door.client.get("/v1/usage", params=parameters)
    assert answer.status_code == 200, answer.text
    rows: list[dict[str, Any]] = answer.json()["data"]
    return rows


async def test_sums_by_job_sku_and_day_with_costs(api: Api) -> None:
    door = await api.tenant()
    first = await job(api, door, usage={"train.sft": 1500, "eval.sft": 200})  # as the ledger sums up its records
    second = await job(api, door)
    await record(api, first, "step:1", 1000, MIDNIGHT)
    await record(api, first, "step:2", 500, MIDNIGHT, state="provisional")
    await record(api, first, "step:2", 500, MIDNIGHT, state="void")
    await record(api, first, "eval:0", 200, MIDNIGHT, sku="eval.sft")
    await record(api, second, "step:1", 7, MIDNIGHT + timedelta(days=1))
    by_sku = await usage(door, job=first[0].id, group_by=["sku"])
    assert by_sku == [
        {
            "object": "usage", "job": None, "sku": "eval.sft", "day": None,
            "quantity": 200, "billable": 200, "provisional": 0, "void": 0, "cost": "0.00002",
        },
        {
            "object": "usage", "job": None, "sku": "train.sft", "day": None,
            "quantity": 1500, "billable": 1000, "provisional": 500, "void": 500, "cost": "0.0006",
        },
    ]  # fmt: skip
    by_job = {row["job"]: (row["quantity"], row["cost"]) for row in await usage(door, group_by=["job"])}
    assert by_job == {first[0].id: (1700, "0.00062"), second[0].id: (7, "0.0000028")}
    by_day = [(row["day"], row["quantity"]) for row in await usage(door, group_by=["day"])]
    assert by_day == [("2026-12-02", 1700), ("2026-12-03", 7)]
    total = await usage(door)
    assert [(row["job"], row["sku"], row["day"], row["cost"]) for row in total] == [(None, None, None, "0.0006228")]
    shown = (await door.get(f"/v1/jobs/{first[0].id}")).json()
    assert (shown["usage"], shown["cost"]) == ({"train.sft": 1500, "eval.sft": 200}, "0.00062")
    assert shown["progress"]["trained_tokens"] == 1500
    assert shown["attempts"] == 1


async def test_dpo_and_rl_are_told_by_every_class_of_token_and_second(api: Api) -> None:
    door = await api.tenant()
    dpo, rl = await job(api, door, method="dpo"), await job(api, door, method="rl", usage=dict(control.RL_USAGE))
    await record(api, dpo, "step:1", 1000, MIDNIGHT, sku="train.dpo")
    for sku, quantity in control.RL_USAGE.items():
        await record(api, rl, "step:1", quantity, MIDNIGHT, sku=sku)
        await record(api, rl, "step:2", quantity, MIDNIGHT, sku=sku, state="void")
    rows = await usage(door, group_by=["sku"])
    # By hand, US dollars per million units of the default price book.
    assert {row["sku"]: (row["quantity"], row["void"], row["cost"]) for row in rows} == {
        "train.dpo": (1000, 0, "0.0008"),
        "train.rl": (100, 100, "0.00008"),
        "rollout.prefill": (40, 40, "0.000004"),
        "rollout.prefill_cached": (280, 280, "0.0000056"),
        "rollout.generated": (120, 120, "0.000048"),
        "reward.cpu_seconds": (3, 3, "0.00006"),
        "reward.llm_input": (50, 50, "0.00001"),
        "reward.llm_output": (5, 5, "0.000004"),
    }
    [total] = await usage(door, job=rl[0].id)
    assert total["cost"] == "0.0002116"
    shown = (await door.get(f"/v1/jobs/{rl[0].id}")).json()
    assert (shown["usage"], shown["cost"]) == (control.RL_USAGE, "0.0002116")
    assert shown["progress"]["trained_tokens"] == 100, "what is generated is not trained"


async def test_g07_days_are_utc_and_windows_half_open(api: Api) -> None:
    door = await api.tenant()
    made = await job(api, door)
    for n, offset in enumerate((timedelta(milliseconds=-1), timedelta(0), timedelta(milliseconds=1))):
        await record(api, made, f"step:{n}", 1, MIDNIGHT + offset)
    rows = await usage(door, group_by=["day"])
    assert [(row["day"], row["quantity"]) for row in rows] == [("2026-12-01", 1), ("2026-12-02", 2)]
    assert (await usage(door, end="2026-12-02T00:00:00Z"))[0]["quantity"] == 1
    assert (await usage(door, start="2026-12-02T00:00:00Z"))[0]["quantity"] == 2
    assert (await usage(door, start="2026-12-02T01:00:00+01:00"))[0]["quantity"] == 2
    assert (await usage(door, start="2026-12-02T00:00:00Z", end="2026-12-02T00:00:00Z"))[0]["quantity"] == 0


async def test_price_is_the_one_pinned_at_submit(own_api: Api) -> None:
    door = await own_api.tenant()
    made = await job(own_api, door)
    await record(own_api, made, "step:1", 1_000_000, MIDNIGHT)
    prices, yesterday = {"train.sft": "9", "eval.sft": "9"}, own_api.clock() - timedelta(days=1)
    await factories.insert(own_api.system_engine, PriceBookRow(id="pb_later", effective_from=yesterday, prices=prices))
    new = (await door.job()).json()["id"]
    assert (await usage(door, job=made[0].id))[0]["cost"] == "0.4"
    model = (await door.get(f"/v1/models/{factories.MODEL_NAME}")).json()
    assert model["prices"]["train.sft"] == "9"
    dear = await job(own_api, door, price_book_id="pb_later")
    await record(own_api, dear, "step:1", 1_000_000, MIDNIGHT)
    assert (await usage(door, job=dear[0].id))[0]["cost"] == "9"
    assert (await door.get(f"/v1/jobs/{new}")).json()["cost"] == "0"


def bucket(day: int, *, is_asked: bool = True, void: int = 0) -> Bucket:
    """One trained token of job_1 on that day."""
    return Bucket("job_1", "train.sft", f"2026-12-{day:02}", is_asked, "pb", billable=1, provisional=0, void=void)


def test_g09_costs_add_up_however_they_are_grouped() -> None:
    """Price 0.0006 dollars a million: 0.6 nano-dollars a token, so that single tokens must round."""
    books = {"pb": {"train.sft": Decimal("0.0006")}}
    days = [bucket(day) for day in range(1, 11)]
    by_day = grouped(days, books, ["day"])
    total = grouped(days, books, [])
    # 10 tokens cost exactly 6 nano-dollars; each one alone would be rounded to 1.
    assert total[0].cost == Decimal("6E-9")
    assert sum(row.cost for row in by_day) == total[0].cost
    assert [int(row.cost * 10**9) for row in by_day] == [1, 0, 1, 0, 1, 1, 0, 1, 0, 1]


def test_days_before_the_start_carry_their_rounding_and_are_not_shown() -> None:
    books = {"pb": {"train.sft": Decimal("0.0006")}}
    (row,) = grouped([bucket(1, is_asked=False), bucket(2, void=5)], books, ["job"])
    assert (row.quantity, row.void, row.cost) == (1, 5, Decimal(0))  # 1.2 rounds to 1, and 1 was the first day's


async def test_a_window_costs_what_it_adds_to_the_rounded_total_before_it(own_api: Api) -> None:
    door = await own_api.tenant()
    prices, yesterday = {"train.sft": "0.0006"}, own_api.clock() - timedelta(days=1)
    await factories.insert(own_api.system_engine, PriceBookRow(id="pb_odd", effective_from=yesterday, prices=prices))
    made = await job(own_api, door, price_book_id="pb_odd")
    for n in range(3):  # 0.6 nano-dollars a day: 0.6, 1.2 and 1.8 so far round to 1, 1 and 2
        await record(own_api, made, f"step:{n}", 1, MIDNIGHT + timedelta(days=n))
    days = [f"2026-12-0{2 + n}T00:00:00Z" for n in range(4)]
    windows = [(await usage(door, start=a, end=b))[0] for a, b in itertools.pairwise(days)]
    assert [(row["quantity"], row["cost"]) for row in windows] == [(1, "0.000000001"), (1, "0"), (1, "0.000000001")]
    assert (await usage(door))[0]["cost"] == "0.000000002"
    assert await usage(door, start=days[3], group_by=["job"]) == [], "nothing was used in it"


async def test_too_many_groups_are_refused_and_never_cut_off(api: Api, monkeypatch: pytest.MonkeyPatch) -> None:
    door = await api.tenant()
    made = await job(api, door)
    for n in range(3):
        await record(api, made, f"step:{n}", 1, MIDNIGHT + timedelta(days=n))
    monkeypatch.setattr("finery_service.usage.service.MAX_ROWS", 2)
    answer = await door.get("/v1/usage?group_by=day")
    error = answer.json()["error"]
    assert (answer.status_code, error["code"], error["param"]) == (400, "too_many_groups", "group_by")
    assert "found 3" in error["message"]
    assert len(await usage(door, group_by=["day"], start="2026-12-03T00:00:00Z")) == 2


@pytest.mark.parametrize(
    ("parameters", "param"),
    [
        ({"start": "2026-12-01T00:00:00"}, "start"),
        ({"end": "2026-12-01"}, "end"),
        ({"start": "yesterday"}, "start"),
        ({"start": "0001-01-01T00:00:00+14:00"}, "start"),
        ({"start": "2026-12-02T00:00:00Z", "end": "2026-12-01T00:00:00Z"}, "start"),
        ({"group_by": "hour"}, "group_by"),
    ],
)
async def test_e18_naive_and_nonsensical_parameters_are_refused(
    api: Api, parameters: dict[str, str], param: str
) -> None:
    door = await api.tenant()
    answer = await door.client.get("/v1/usage", params=parameters)
    assert (answer.status_code, answer.json()["error"]["param"]) == (400, param)


async def test_other_tenants_usage_is_not_seen(api: Api) -> None:
    door, other = await api.tenant(), await api.tenant()
    made = await job(api, door)
    await record(api, made, "step:1", 5, MIDNIGHT)
    assert (await usage(other))[0]["quantity"] == 0
    assert await usage(other, group_by=["job"]) == []
    assert (await other.get(f"/v1/usage?job={made[0].id}")).status_code == 404
