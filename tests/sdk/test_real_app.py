"""The client against the real API on a real database, in process: both read the same contract."""

from __future__ import annotations

import hashlib
from datetime import UTC, datetime
from pathlib import Path

import pytest
from sqlmodel import select

from finery import AsyncFinery, BadRequestError, ConflictError, JobFailedError, NotFoundError, PermissionDeniedError
from finery.types.jobs import JobState
from finery.types.methods import SftHyperparameters, SftJobCreate
from finery.types.reasons import JobReason
from finery_service.db.engine import transaction
from finery_service.db.tables import JobRow
from finery_service.jobs import store
from finery_testing import factories
from finery_testing.api import CHAT_ROW, Api, jsonl

from .real_app import FILES, client_with, end, publish

NAME = "tränings data 你好 😀.jsonl"


async def test_e17_a_file_keeps_its_name_and_its_bytes(client: AsyncFinery) -> None:
    content = jsonl(CHAT_ROW, CHAT_ROW)
    file = await client.files.upload(content, name=NAME)
    assert (file.name, file.status, file.rows, file.bytes) == (NAME, "valid", 2, len(content))
    assert file.sha256 == hashlib.sha256(content).hexdigest()
    assert await client.files.retrieve(file) == file
    wrong = await client.files.upload(jsonl(CHAT_ROW, {"messages": 7}))
    assert (wrong.status, wrong.error_count, wrong.errors[0].line) == ("invalid", 1, 2)


NAMES = [
    "a\u0308.jsonl",
    'quote".jsonl',
    "back\\slash.jsonl",
    "../../etc/passwd",
    ".hidden",
    "a;b=c%0A.jsonl",
    "ä" * 127,
]
REFUSED = ["line\r\nX-Evil: 1.jsonl", "nul\0.jsonl", "   ", "n" * 300, "ä" * 128]


async def test_e17_every_name_comes_back_as_it_was_sent_or_is_refused(client: AsyncFinery) -> None:
    for name in NAMES:
        file = await client.files.upload(jsonl(CHAT_ROW), name=name)
        assert (file.name, (await client.files.retrieve(file)).name) == (name, name)
    for name in REFUSED:
        with pytest.raises(BadRequestError) as caught:
            await client.files.upload(jsonl(CHAT_ROW), name=name)
        assert caught.value.code == "invalid_file_name"
    assert {file.name async for file in client.files.list()} == set(NAMES)


async def test_a_job_is_created_listed_cancelled_and_waited_for(real_api: Api, client: AsyncFinery) -> None:
    file = await client.files.upload(jsonl(CHAT_ROW))
    hyper = SftHyperparameters(max_steps=4, learning_rate=3e-4)
    request = SftJobCreate(method="sft", model=factories.MODEL_NAME, training_file=file.id, hyperparameters=hyper)
    job = await client.jobs.create(request)
    assert SftHyperparameters.model_validate(job.hyperparameters) == hyper
    others = [await client.jobs.create(method="sft", model=factories.MODEL_NAME, training_file=file) for _ in range(4)]
    listed = [found.id async for found in client.jobs.list(limit=2)]
    assert sorted(listed) == sorted([job.id, *(other.id for other in others)])
    assert (await client.jobs.cancel(job)).intent == "cancel"
    await end(real_api, job.id, JobState.CANCELLED, JobReason.CANCELLED_BY_CUSTOMER)
    with pytest.raises(JobFailedError) as caught:
        await client.jobs.wait(job.id)
    assert (caught.value.job.state, caught.value.job.reason) == ("cancelled", "cancelled_by_customer")


async def test_the_stream_is_the_list_and_goes_on_behind_a_cursor(real_api: Api, client: AsyncFinery) -> None:
    file = await client.files.upload(jsonl(CHAT_ROW))
    job = await client.jobs.create(method="sft", model=factories.MODEL_NAME, training_file=file.id)
    text = "U+2028 \u2028, U+0085 \x85, 🔥, \r\n"
    async with transaction(real_api.system_engine) as session:
        tenant = (await session.exec(select(JobRow.tenant_id).where(JobRow.id == job.id))).one()
        for step in range(1, 151):
            data = {"step": step, "loss": 1.5, "text": text}
            await store.append_event(session, tenant=tenant, job=job.id, type="metric", data=data, now=real_api.clock())
    await end(real_api, job.id, JobState.SUCCEEDED, JobReason.COMPLETED)
    events = await client.jobs.events(job.id)
    assert [event.seq for event in events] == list(range(1, len(events) + 1))
    assert len([event for event in events if event.data.get("text") == text]) == 150
    assert [event async for event in client.jobs.stream(job.id)] == events
    assert [event async for event in client.jobs.stream(job.id, after=140)] == events[140:]
    assert (await client.jobs.wait(job.id)).state == "succeeded"
    with pytest.raises(ConflictError) as caught:
        await client.jobs.cancel(job.id)
    assert caught.value.code == "job_already_terminal"


async def test_d14_a_checkpoint_is_downloaded_and_a_partial_completed(
    real_api: Api, client: AsyncFinery, tmp_path: Path
) -> None:
    file = await client.files.upload(jsonl(CHAT_ROW))
    job = await client.jobs.create(method="sft", model=factories.MODEL_NAME, training_file=file.id)
    id_ = await publish(real_api, job.id)
    (found,) = [checkpoint async for checkpoint in client.checkpoints.list(job=job)]
    assert found.id == id_
    content = FILES["sub/adapter_model.safetensors"]
    sub = tmp_path / "out" / "sub"
    sub.mkdir(parents=True)
    digest = hashlib.sha256(content).hexdigest()
    (sub / f".adapter_model.safetensors.{digest[:12]}.part").write_bytes(content[:1000])
    told: list[tuple[int, int]] = []
    out = await client.checkpoints.download(id_, tmp_path / "out", on_progress=lambda *at: told.append(at))
    assert {str(p.relative_to(out)): p.read_bytes() for p in out.rglob("*") if p.is_file()} == FILES
    assert told[-1] == (found.bytes, found.bytes)


async def test_usage_is_asked_for_in_every_way(client: AsyncFinery) -> None:
    day = datetime(2026, 11, 30, tzinfo=UTC)
    assert await client.usage.list(start=day, end=day.replace(day=1, month=12), group_by=["job", "sku", "day"]) == []
    with pytest.raises(BadRequestError) as caught:
        await client.usage.list(group_by=["moon"])  # type: ignore[list-item]
    assert caught.value.param == "group_by"


async def test_refusals_name_the_field_and_the_request(client: AsyncFinery) -> None:
    with pytest.raises(NotFoundError) as missing:
        await client.jobs.retrieve("job_0000000000000000000000000000000000")
    assert (missing.value.code, missing.value.status) == ("job_not_found", 404)
    assert missing.value.request_id
    with pytest.raises(BadRequestError) as wrong:
        await client.jobs.create(
            method="sft", model=factories.MODEL_NAME, training_file="file_1", hyperparameters={"learning_rate": -1}
        )
    assert wrong.value.param == "hyperparameters.learning_rate"
    with pytest.raises(PermissionDeniedError):
        await client.admin.tenants.create(name="mine")


async def test_an_operator_makes_a_tenant_a_key_and_a_model(real_api: Api) -> None:
    door = await real_api.operator()
    operator = client_with(real_api, door.headers["authorization"].removeprefix("Bearer "))
    tenant = await operator.admin.tenants.create(name="acme")
    key = await operator.admin.keys.create(tenant, name="laptop")
    await operator.models.create(name="tiny", source={"type": "path", "path": "/models/tiny"}, max_length=64)
    member = client_with(real_api, key.secret)
    assert (await member.models.retrieve("tiny")).max_length == 64
    assert "tiny" in [model.name async for model in member.models.list()]
    assert [listed.secret async for listed in operator.admin.keys.list(tenant)] == [None]
    assert (await operator.admin.keys.revoke(tenant, key)).revoked_at is not None
    assert [listed.id async for listed in operator.admin.tenants.list()] == [tenant.id]
