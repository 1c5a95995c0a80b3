from __future__ import annotations

import json
import subprocess
import sys
from datetime import UTC, datetime, timedelta, timezone
from decimal import Decimal
from typing import Any
from urllib.parse import parse_qsl

import httpx
import pytest

from finery import APIError, _calls
from finery.errors import InvalidArgumentError
from finery.types.files import File
from finery.types.methods import LoraAdapter, SftHyperparameters, SftJobCreate

from .support import BOTH, Client, event_json, file_json, items, job_json, mocked, page_json, value

USAGE = {
    "object": "usage",
    "sku": "train.sft",
    "quantity": 9,
    "billable": 9,
    "provisional": 0,
    "void": 0,
    "cost": "0.1",
}


class Recorder:
    def __init__(self, *documents: Any) -> None:
        self.documents = list(documents)
        self.requests: list[httpx.Request] = []

    def __call__(self, request: httpx.Request) -> httpx.Response:
        self.requests.append(request)
        return httpx.Response(200, json=self.documents.pop(0) if len(self.documents) > 1 else self.documents[0])

    @property
    def queries(self) -> list[dict[str, str]]:
        return [dict(request.url.params) for request in self.requests]


@pytest.mark.parametrize("kind", BOTH)
async def test_a_job_is_the_fields_as_they_were_given(kind: Client) -> None:
    record = Recorder(job_json())
    file = File.model_validate(file_json())
    await value(
        mocked(kind, record).jobs.create(
            method="whatever",
            training_file=file,
            hyperparameters={"learning_rate": -1, "nonsense": [1, None]},
            limits={"max_cost": Decimal("1.50")},
            adapter=LoraAdapter(rank=4),
        )
    )
    (request,) = record.requests
    assert (request.method, request.url.path) == ("POST", "/v1/jobs")
    assert json.loads(request.content) == {
        "method": "whatever",
        "training_file": "file_1",
        "hyperparameters": {"learning_rate": -1, "nonsense": [1, None]},
        "limits": {"max_cost": "1.50"},
        "adapter": {"rank": 4},
    }


@pytest.mark.parametrize("kind", BOTH)
async def test_a_request_class_says_the_same_as_its_fields(kind: Client) -> None:
    record = Recorder(job_json())
    request = SftJobCreate(
        method="sft", model="m", training_file="file_1", hyperparameters=SftHyperparameters(max_steps=4)
    )
    await value(mocked(kind, record).jobs.create(request))
    assert SftJobCreate.model_validate_json(record.requests[0].content) == request
    fields = {"method": "sft", "model": "m", "training_file": "file_1", "hyperparameters": {"max_steps": 4}}
    assert json.loads(record.requests[0].content) == fields, "a default is not a wish"
    with pytest.raises(TypeError, match="found both: model"):
        await value(mocked(kind, record).jobs.create(request, model="m"))


@pytest.mark.parametrize("number", [float("nan"), float("inf")])
def test_what_json_cannot_say_is_refused_before_it_is_sent(number: float) -> None:
    call = _calls.create_job({"method": "sft", "hyperparameters": {"learning_rate": number}}, "k")
    with pytest.raises(ValueError, match=r": [^ ]*: expected a finite number"):
        call.body()


def test_a_function_is_no_grader_and_the_error_says_what_is() -> None:
    spec = {"type": "prompts", "file": "file_1", "grader": len}
    with pytest.raises(InvalidArgumentError, match=r"found builtin_function.*finery\.graders\.python"):
        _calls.create_environment({"spec": spec}, "k")
    with pytest.raises(InvalidArgumentError, match="expected what JSON can hold, found object: <object"):
        _calls.create_job({"method": "rl", "environment": {"config": {"x": object()}}}, "k")


@pytest.mark.parametrize("id_", ["", ".", ".."])
@pytest.mark.parametrize("kind", BOTH)
async def test_an_id_that_would_change_the_path_is_refused(kind: Client, id_: str) -> None:
    client = mocked(kind, Recorder(job_json()))
    with pytest.raises(ValueError, match="expected the id of a job"):
        await value(client.jobs.retrieve(id_))
    with pytest.raises(ValueError, match="expected the id of a job"):
        client.jobs.stream(id_)


def test_ids_and_file_names_are_quoted() -> None:
    assert _calls.retrieve_job("a/../b?c#d é").path == "/v1/jobs/a%2F..%2Fb%3Fc%23d%20%C3%A9"
    assert (
        _calls.download_file("ckpt_1", "sub dir/a?b.bin", 0).path == "/v1/checkpoints/ckpt_1/files/sub%20dir/a%3Fb.bin"
    )


@pytest.mark.parametrize("kind", BOTH)
async def test_lists_fetch_a_page_when_it_is_needed(kind: Client) -> None:
    pages = [
        page_json([job_json(id=f"job_{n}") for n in names], has_more=more, last_id=f"job_{names[-1]}")
        for names, more in (((9, 8), True), ((7, 6), True), ((5,), False))
    ]
    record = Recorder(*pages)
    jobs = mocked(kind, record).jobs.list(limit=2)
    assert record.requests == []
    assert [job.id for job in await items(jobs)] == ["job_9", "job_8", "job_7", "job_6", "job_5"]
    assert record.queries == [{"limit": "2"}, {"limit": "2", "after": "job_8"}, {"limit": "2", "after": "job_6"}]


async def test_a_list_that_is_left_early_fetches_no_more() -> None:
    record = Recorder(page_json([job_json(id="job_9")], has_more=True, last_id="job_9"))
    client = mocked(BOTH[0], record)
    assert next(iter(client.jobs.list())).id == "job_9"
    aclient = mocked(BOTH[1], record)
    assert (await anext(aiter(aclient.jobs.list()))).id == "job_9"
    assert len(record.requests) == 2


@pytest.mark.parametrize("kind", BOTH)
@pytest.mark.parametrize("last_id", [None, "job_9"])
async def test_a_server_that_repeats_a_page_does_not_loop_the_client(kind: Client, last_id: str | None) -> None:
    record = Recorder(page_json([job_json(id="job_9")], has_more=True, last_id=last_id))
    with pytest.raises(APIError, match="expected has_more to come with a new last_id"):
        await items(mocked(kind, record).jobs.list())
    assert len(record.requests) <= 2


@pytest.mark.parametrize("kind", BOTH)
async def test_events_are_read_to_the_end_or_to_the_limit(kind: Client) -> None:
    first = page_json([event_json(n) for n in (3, 4)], has_more=True, last_id="4")
    record = Recorder(first, page_json([event_json(5)]), first)
    client = mocked(kind, record)
    assert [event.seq for event in await value(client.jobs.events("job_1", after=2))] == [3, 4, 5]
    assert [query["after"] for query in record.queries] == ["2", "4"]
    assert [event.seq for event in await value(client.jobs.events("job_1", after=2, limit=1))] == [3]


NAIVE = [datetime(2026, 11, 1, 1, 30), datetime(2026, 11, 1, 1, 30, fold=1)]  # noqa: DTZ001 (twice in New York)


@pytest.mark.parametrize("kind", BOTH)
@pytest.mark.parametrize("moment", NAIVE)
@pytest.mark.parametrize("name", ["start", "end"])
async def test_e18_a_time_without_a_zone_is_refused(kind: Client, moment: datetime, name: str) -> None:
    record = Recorder(page_json([USAGE]))
    with pytest.raises(ValueError, match=f"{name}: expected a time with a zone, found the naive 2026-11-01T01:30:00"):
        await value(mocked(kind, record).usage.list(**{name: moment}))
    with pytest.raises(ValueError, match="naive"):
        await value(mocked(kind, record).jobs.create(method="sft", metadata={"at": moment}))
    assert record.requests == []


@pytest.mark.parametrize("kind", BOTH)
async def test_e18_a_time_with_a_zone_goes_out_as_utc(kind: Client) -> None:
    record = Recorder(page_json([USAGE]))
    start = datetime(2026, 11, 1, 1, 30, tzinfo=timezone(timedelta(hours=-4)))
    rows = await value(mocked(kind, record).usage.list(job="job_1", start=start, end=datetime(2026, 11, 2, tzinfo=UTC)))
    assert record.queries[0]["start"] == "2026-11-01T05:30:00Z"
    assert record.queries[0]["end"] == "2026-11-02T00:00:00Z"
    assert [(row.sku, row.quantity, row.cost) for row in rows] == [("train.sft", 9, Decimal("0.1"))]


def test_e18_both_half_past_ones_of_new_york_are_told_apart() -> None:
    code = """
from datetime import datetime
from zoneinfo import ZoneInfo
from finery import _calls
for fold in (0, 1):
    start = datetime(2026, 11, 1, 1, 30, fold=fold, tzinfo=ZoneInfo("America/New_York"))
    print(dict(_calls.list_usage(None, start, None, []).params)["start"])
"""
    done = subprocess.run(
        [sys.executable, "-c", code], env={"TZ": "America/New_York"}, capture_output=True, text=True, timeout=60
    )
    assert done.stdout.split() == ["2026-11-01T05:30:00Z", "2026-11-01T06:30:00Z"], done.stderr


@pytest.mark.parametrize("kind", BOTH)
async def test_usage_is_grouped_as_asked(kind: Client) -> None:
    record = Recorder(page_json([]))
    client = mocked(kind, record)
    assert await value(client.usage.list(group_by=["sku", "day"])) == []
    assert parse_qsl(record.requests[0].url.query.decode()) == [("group_by", "sku"), ("group_by", "day")]
    with pytest.raises(TypeError, match="as a list"):
        await value(client.usage.list(group_by="sku"))


@pytest.mark.parametrize("kind", BOTH)
async def test_operators_make_tenants_keys_and_models(kind: Client) -> None:
    now = "2026-11-30T12:00:00Z"
    tenant = {"id": "ten_1", "name": "acme", "default_project": "proj_1", "created_at": now}
    key = {"id": "key_1", "name": "k", "tenant": "ten_1", "project": "proj_1", "prefix": "fny_ab", "created_at": now}
    model = {"id": "mdl_1", "name": "m", "max_length": 8, "created_at": now}
    record = Recorder(
        tenant, {**key, "secret": "fny_abc"}, page_json([key]), {**key, "revoked_at": now}, model, page_json([tenant])
    )
    client = mocked(kind, record)
    made = await value(client.admin.tenants.create(name="acme"))
    assert (await value(client.admin.keys.create(made, name="k"))).secret == "fny_abc"
    (listed,) = await items(client.admin.keys.list(made.id))
    assert (await value(client.admin.keys.revoke(made, listed))).revoked_at is not None
    await value(client.models.create(name="m", source={"type": "path", "path": "/m"}))
    assert [t.name for t in await items(client.admin.tenants.list())] == ["acme"]
    assert [f"{request.method} {request.url.path}" for request in record.requests] == [
        "POST /v1/tenants",
        "POST /v1/tenants/ten_1/keys",
        "GET /v1/tenants/ten_1/keys",
        "DELETE /v1/tenants/ten_1/keys/key_1",
        "POST /v1/models",
        "GET /v1/tenants",
    ]
