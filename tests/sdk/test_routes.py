"""Which request each call of the client is, and what it makes of the answer."""

from __future__ import annotations

import json
import subprocess
import sys
from datetime import UTC, datetime, timedelta, timezone
from decimal import Decimal
from typing import Any

import httpx
import pytest

from finery import ConflictError, FineryError, InvalidArgumentError, NotFoundError
from finery.types.jobs import JobState
from finery.types.methods import FullWeights, Limits, LoraAdapter, SftHyperparameters, SftJobCreate

from .support import Client, checkpoint_json, error_json, file_json, items, job_json, mocked, page_json, value

NAIVE = [datetime(2026, 11, 1, 1, 30), datetime(2026, 11, 1, 1, 30, fold=1)]  # noqa: DTZ001 (twice in New York)
SFT = {"method": "sft", "model": "m", "training_file": "file_1"}


class Recorder:
    def __init__(self, *answers: httpx.Response) -> None:
        self.answers = list(answers)
        self.requests: list[httpx.Request] = []

    def __call__(self, request: httpx.Request) -> httpx.Response:
        self.requests.append(request)
        return self.answers.pop(0) if len(self.answers) > 1 else self.answers[0]

    @property
    def sent(self) -> list[str]:
        return [f"{request.method} {request.url.path}" for request in self.requests]


def ok(document: dict[str, Any]) -> httpx.Response:
    return httpx.Response(200, json=document)


@pytest.mark.parametrize("verb", ["cancel", "pause", "resume"])
async def test_a_job_is_turned_with_an_idempotency_key(kind: Client, verb: str) -> None:
    record = Recorder(ok(job_json(intent=verb)))
    client = mocked(kind, record)
    for _ in range(2):
        assert (await value(getattr(client.jobs, verb)("job_1"))).intent == verb
    assert record.sent == [f"POST /v1/jobs/job_1/{verb}"] * 2
    assert len({request.headers["idempotency-key"] for request in record.requests}) == 2


async def test_what_is_given_is_changed_and_the_rest_stays(kind: Client) -> None:
    record = Recorder(ok(job_json()))
    client = mocked(kind, record)
    for changes in ({"name": "new"}, {"name": None}, {"metadata": {"a": "b"}}, {"name": "x", "metadata": {}}):
        await value(client.jobs.update("job_1", **changes))
        assert json.loads(record.requests[-1].content) == changes
    assert set(record.sent) == {"PATCH /v1/jobs/job_1"}
    with pytest.raises(InvalidArgumentError, match="expected name or metadata"):
        await value(client.jobs.update("job_1"))


async def test_jobs_are_filtered_by_the_server(kind: Client) -> None:
    record = Recorder(ok(page_json([job_json()], has_more=True, last_id="job_1")), ok(page_json([])))
    since = datetime(2026, 11, 1, 1, 30, tzinfo=timezone(timedelta(hours=-4)))
    found = mocked(kind, record).jobs.list(
        state=JobState.RUNNING,
        method="sft",
        project="proj_1",
        created_after=since,
        created_before=datetime(2026, 12, 1, tzinfo=UTC),
        limit=7,
    )
    assert [job.id for job in await items(found)] == ["job_1"]
    query = {
        "state": "running",
        "method": "sft",
        "project": "proj_1",
        "created_after": "2026-11-01T05:30:00Z",
        "created_before": "2026-12-01T00:00:00Z",
        "limit": "7",
    }
    assert [dict(request.url.params) for request in record.requests] == [query, {**query, "after": "job_1"}]


async def test_of_several_states_any_will_do(kind: Client) -> None:
    record = Recorder(ok(page_json([])))
    assert await items(mocked(kind, record).jobs.list(state=[JobState.QUEUED, "running"], method=("sft",))) == []
    assert record.requests[0].url.query == b"state=queued&state=running&method=sft"


@pytest.mark.parametrize("moment", NAIVE)
@pytest.mark.parametrize("name", ["created_after", "created_before"])
async def test_e18_a_naive_time_is_refused_when_jobs_are_listed(kind: Client, moment: datetime, name: str) -> None:
    record = Recorder(ok(page_json([])))
    with pytest.raises(ValueError, match=f"{name}: expected a time with a zone, found the naive 2026-11-01T01:30:00"):
        await items(mocked(kind, record).jobs.list(**{name: moment}))
    assert record.requests == []


def test_e18_in_new_york_a_naive_half_past_one_is_refused_and_the_two_aware_ones_are_two_times() -> None:
    code = """
from datetime import datetime
from zoneinfo import ZoneInfo
from finery import Finery, _calls
for fold in (0, 1):
    try: list(Finery("k", "http://127.0.0.1:1").jobs.list(created_after=datetime(2026, 11, 1, 1, 30, fold=fold)))
    except ValueError as error: assert "naive 2026-11-01T01:30:00" in str(error); print("refused")
    moment = datetime(2026, 11, 1, 1, 30, fold=fold, tzinfo=ZoneInfo("America/New_York"))
    print(dict(_calls.list_jobs(created_after=moment).params)["created_after"])
"""
    environment = {"TZ": "America/New_York"}
    done = subprocess.run([sys.executable, "-c", code], env=environment, capture_output=True, text=True, timeout=60)
    assert done.stdout.split() == ["refused", "2026-11-01T05:30:00Z", "refused", "2026-11-01T06:30:00Z"], done.stderr


@pytest.mark.parametrize(("status", "body"), [(204, b""), (200, b'{"id": "file_1", "deleted": true}')])
async def test_a_deletion_hands_out_nothing(kind: Client, status: int, body: bytes) -> None:
    record = Recorder(*(httpx.Response(status, content=body) for _ in range(2)))
    client = mocked(kind, record)
    assert await value(client.files.delete("file_1")) is None
    assert await value(client.checkpoints.delete("ckpt_1")) is None
    assert record.sent == ["DELETE /v1/files/file_1", "DELETE /v1/checkpoints/ckpt_1"]


async def test_e19_a_deletion_whose_answer_was_lost_is_done(kind: Client) -> None:
    gone = httpx.Response(404, json=error_json("file_not_found"))
    record = Recorder(httpx.Response(503, json=error_json("away")), gone)
    assert await value(mocked(kind, record).files.delete("file_1")) is None
    with pytest.raises(NotFoundError):
        await value(mocked(kind, record).files.delete("file_1"))
    assert len(record.requests) == 3


async def test_what_is_in_use_is_not_deleted(kind: Client) -> None:
    record = Recorder(httpx.Response(409, json=error_json("file_in_use", "Job job_1 trains on it.")))
    with pytest.raises(ConflictError, match="trains on it"):
        await value(mocked(kind, record).files.delete("file_1"))
    assert len(record.requests) == 1


async def test_files_belong_to_a_project(kind: Client) -> None:
    record = Recorder(ok(page_json([file_json()])))
    assert [file.id for file in await items(mocked(kind, record).files.list(project="proj_2"))] == ["file_1"]
    assert dict(record.requests[0].url.params) == {"project": "proj_2"}


async def test_the_best_checkpoint_is_the_one_that_the_job_names(kind: Client) -> None:
    record = Recorder(ok(job_json(best_checkpoint="ckpt_7")), ok(checkpoint_json({}, id="ckpt_7", best=True)))
    best = await value(mocked(kind, record).checkpoints.best("job_1"))
    assert (best.id, best.best, record.sent) == ("ckpt_7", True, ["GET /v1/jobs/job_1", "GET /v1/checkpoints/ckpt_7"])
    for job, why in (
        (job_json(), "it has no validation file"),
        (job_json(validation_file="file_2"), r"none was evaluated yet \(running\)"),
        (job_json(method="rl"), "it holds no eval_prompts out"),
        (job_json(method="rl", hyperparameters={"eval_prompts": 8}), r"none was evaluated yet \(running\)"),
    ):
        with pytest.raises(FineryError, match=f"Job job_1 has no best checkpoint: {why}"):
            await value(mocked(kind, Recorder(ok(job))).checkpoints.best("job_1"))


TYPED = SftJobCreate(
    method="sft",
    model="m",
    training_file="file_1",
    validation_file="file_2",
    adapter=LoraAdapter(rank=8, targets=("q_proj", "v_proj"), modules_to_save=("embed_tokens", "lm_head")),
    added_tokens=("<tool>", "</tool>"),
    export_merged=True,
    hyperparameters=SftHyperparameters(
        truncation="drop", schedule="wsd", decay_ratio=0.25, train_on="last", early_stopping_patience=3
    ),
    limits=Limits(max_cost=Decimal("0.0000004")),
)
PLAIN = {
    **SFT,
    "validation_file": "file_2",
    "adapter": {
        "type": "lora",
        "rank": 8,
        "targets": ("q_proj", "v_proj"),
        "modules_to_save": ("embed_tokens", "lm_head"),
    },
    "added_tokens": ("<tool>", "</tool>"),
    "export_merged": True,
    "hyperparameters": {
        "truncation": "drop",
        "schedule": "wsd",
        "decay_ratio": 0.25,
        "train_on": "last",
        "early_stopping_patience": 3,
    },
    "limits": {"max_cost": Decimal("0.0000004")},
}


async def test_every_field_of_a_job_goes_out_typed_or_plain(kind: Client) -> None:
    record = Recorder(ok(job_json()))
    client = mocked(kind, record)
    await value(client.jobs.create(TYPED))
    await value(client.jobs.create(**PLAIN))
    for request in record.requests:
        assert SftJobCreate.model_validate_json(request.content) == TYPED
        assert json.loads(request.content)["limits"]["max_cost"] == "0.0000004", "money is text, never a float"


@pytest.mark.parametrize("adapter", [{"type": "full"}, FullWeights(type="full")], ids=["plain", "typed"])
async def test_all_weights_from_a_merged_checkpoint(kind: Client, adapter: Any) -> None:
    record = Recorder(ok(job_json()))
    fields = {"from_checkpoint": "ckpt_1", "merge_checkpoint": True, "adapter": adapter}
    await value(mocked(kind, record).jobs.create(method="sft", training_file="file_1", **fields))
    sent = SftJobCreate.model_validate_json(record.requests[0].content)
    assert (sent.adapter, sent.merge_checkpoint, sent.from_checkpoint) == (FullWeights(type="full"), True, "ckpt_1")
