"""The client's newer calls against the real API on a real database, in process."""

from __future__ import annotations

import asyncio
from datetime import UTC, datetime, timedelta
from typing import Any

import pytest
from sqlmodel import select

from finery import AsyncFinery, BadRequestError, ConflictError, NotFoundError, PreviewFailedError, WaitTimeoutError
from finery.types.jobs import JobState
from finery.types.reasons import JobReason
from finery_service.db.engine import transaction
from finery_service.db.tables import JobRow
from finery_testing import factories
from finery_testing.api import CHAT_ROW, Api, jsonl

from .real_app import end, publish

SFT: dict[str, Any] = {"method": "sft", "model": factories.MODEL_NAME}


async def test_a_job_is_named_paused_resumed_and_found(real_api: Api, client: AsyncFinery) -> None:
    file = await client.files.upload(jsonl(CHAT_ROW))
    job = await client.jobs.create(**SFT, training_file=file, name="old", metadata={"a": "1"})
    other = await client.jobs.create(**SFT, training_file=file)
    changed = await job.update(name="new", metadata={"b": "2"})
    assert (changed.name, changed.metadata) == ("new", {"b": "2"})
    assert (await job.update(name=None)).name is None
    assert (await job.refresh()).metadata == {"b": "2"}
    assert [(await turn()).intent for turn in (job.pause, job.pause, job.resume)] == ["pause", "pause", "run"]
    await end(real_api, other.id, JobState.SUCCEEDED, JobReason.COMPLETED)
    for state, ids in (
        ("validating", [job.id]),
        ("succeeded", [other.id]),
        (["validating", "succeeded"], 2),
        ("paused", []),
    ):
        found = [one.id async for one in client.jobs.list(state=state, method="sft", project=job.project)]
        assert found == ids or len(found) == ids
    with pytest.raises(ConflictError):
        await other.pause()
    with pytest.raises(BadRequestError):
        _ = [one async for one in client.jobs.list(state="asleep")]


async def test_e18_jobs_are_found_by_when_they_were_created(real_api: Api, client: AsyncFinery) -> None:
    file = await client.files.upload(jsonl(CHAT_ROW))
    job = await client.jobs.create(**SFT, training_file=file)
    at, hour = job.created_at, timedelta(hours=1)
    assert (at.tzinfo, job.model_dump(mode="json")["created_at"][-1]) == (UTC, "Z")
    for after, before, found in ((at - hour, at + hour, 1), (at + hour, None, 0), (None, at - hour, 0)):
        listed = client.jobs.list(created_after=after, created_before=before)
        assert len([one async for one in listed]) == found
    with pytest.raises(ValueError, match="naive"):
        _ = [one async for one in client.jobs.list(created_after=datetime(2026, 11, 1, 1, 30, fold=1))]  # noqa: DTZ001


async def test_files_and_checkpoints_are_deleted_unless_they_are_in_use(
    real_api: Api,
    client: AsyncFinery,
) -> None:
    file = await client.files.upload(jsonl(CHAT_ROW))
    job = await client.jobs.create(**SFT, training_file=file)
    with pytest.raises(ConflictError) as caught:
        await file.delete()
    assert caught.value.code == "file_in_use"
    await publish(real_api, job.id)
    await end(real_api, job.id, JobState.SUCCEEDED, JobReason.COMPLETED)
    (checkpoint,) = [one async for one in (await job.refresh()).checkpoints()]
    await checkpoint.delete()
    await file.delete()
    for gone in (client.files.retrieve(file), client.checkpoints.retrieve(checkpoint), file.delete()):
        with pytest.raises(NotFoundError):
            await gone
    assert [one async for one in client.files.list(project=file.project)] == []


ROW = {"line": 1, "tokens": [{"id": 7, "text": "ok", "trained": True}], "trained_tokens": 1}


async def made_by_a_worker(api: Api, state: JobState, **found: Any) -> str:
    """Wait for a preview that is asked for, and end it as the preparation does."""
    while True:
        async with transaction(api.system_engine) as session:
            query = select(JobRow).where(JobRow.kind == "preview", JobRow.state == "validating")
            row = (await session.exec(query)).first()
            if row is not None:
                row.preview = {**(row.preview or {}), "rows": [ROW]}
                row.state, row.error = state.value, found.get("error")
                row.finished_at = api.clock()
                session.add(row)
                return row.id
        await asyncio.sleep(0.02)


async def test_a_preview_is_waited_for_until_a_worker_made_it(real_api: Api, client: AsyncFinery) -> None:
    file = await client.files.upload(jsonl(CHAT_ROW))
    asked = asyncio.create_task(file.preview(model=factories.MODEL_NAME, rows=1, train_on="last"))
    id_ = await made_by_a_worker(real_api, JobState.SUCCEEDED)
    preview = await asked
    assert (preview.id, preview.status, preview.rows[0].tokens[0].trained) == (id_, "ready", True)
    assert "⟦ok⟧" in preview.text(color=False)
    error = {"message": "Gone.", "type": "invalid_request_error", "code": "invalid_data"}
    asked = asyncio.create_task(file.preview(model=factories.MODEL_NAME))
    await made_by_a_worker(real_api, JobState.FAILED, error=error)
    with pytest.raises(PreviewFailedError, match=r"failed \(invalid_data\): Gone\."):
        await asked
    with pytest.raises(WaitTimeoutError, match="no worker has come"):
        await file.preview(model=factories.MODEL_NAME, timeout=0.3)
    with pytest.raises(BadRequestError) as caught:
        await file.preview(model="nobody")
    assert caught.value.code == "model_not_found"
