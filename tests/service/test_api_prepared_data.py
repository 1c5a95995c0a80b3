"""Prepared data, in which every row of a file is, does not outlive its job."""

from __future__ import annotations

import obstore
import pytest

from finery_service.db.engine import transaction
from finery_service.db.tables import AttemptRow, JobRow
from finery_service.jobs import purge
from finery_testing import control, factories
from finery_testing.api import Api, Door, checkpoint


async def prepared(api: Api, door: Door, *, state: str, cleaned: bool = True) -> JobRow:
    """A job with the data of two prepare attempts, the first of which was lost, and a checkpoint."""
    now = api.clock()
    job = await factories.job(api.system_engine, door.tenant, now=now, state=state)
    ended = {"state": "ended", "ended_at": now, "cleaned_at": now if cleaned else None}
    for fence, reason in ((101, "worker_lost"), (102, "completed")):
        attempt = await factories.attempt(
            api.system_engine, job, now=now, kind="prepare", fence=fence, reason=reason, **ended
        )
        await put(api, f"{prefix(attempt)}prepared/train.bin")
    row = await checkpoint(api.system_engine, job, now=now)
    await put(api, f"{row.prefix}adapter_model.safetensors")
    async with transaction(api.system_engine) as session:
        stored = await session.get_one(JobRow, (job.tenant_id, job.id))
        stored.prepared_prefix = f"{prefix(attempt)}prepared/"
        (await session.get_one(AttemptRow, (job.tenant_id, row.attempt_id))).cleaned_at = now
    return job


def prefix(attempt: AttemptRow) -> str:
    return f"{attempt.tenant_id}/jobs/{attempt.job_id}/{attempt.id}/"


async def put(api: Api, key: str) -> None:
    await obstore.put_async(api.app.state.services.store, key, b"abc")


def names(api: Api, job: JobRow) -> list[str]:
    return sorted(key.rsplit("/", 1)[1] for key in api.objects() if f"/{job.id}/" in key)


async def sweep(api: Api) -> int:
    return await purge.sweep(api.system_engine, api.app.state.services.store)


@pytest.mark.parametrize("state", ["succeeded", "failed", "cancelled"])
async def test_it_goes_when_the_job_has_ended_and_checkpoints_stay(own_api: Api, state: str) -> None:
    door = await own_api.tenant()
    job = await prepared(own_api, door, state=state)
    assert names(own_api, job) == ["adapter_model.safetensors", "train.bin", "train.bin"]
    assert await sweep(own_api) == 1
    assert names(own_api, job) == ["adapter_model.safetensors"]
    assert await sweep(own_api) == 0
    assert (await door.get(f"/v1/jobs/{job.id}")).json()["state"] == state


async def test_log_probs_of_the_reference_go_with_it(own_api: Api) -> None:
    job = await prepared(own_api, await own_api.tenant(), state="succeeded")
    await control.execute(own_api.system_engine, "update jobs set method = 'dpo' where id = :id", id=job.id)
    [training] = [one for one in await control.attempts(own_api.system_engine, job.id) if one.kind == "train"]
    await put(own_api, f"{prefix(training)}reference/reference.npz")
    assert await sweep(own_api) == 1
    assert names(own_api, job) == ["adapter_model.safetensors"]


@pytest.mark.parametrize("state", ["queued", "running", "paused"])
async def test_a_job_that_may_go_on_keeps_it(own_api: Api, state: str) -> None:
    job = await prepared(own_api, await own_api.tenant(), state=state)
    assert await sweep(own_api) == 0
    assert len(names(own_api, job)) == 3


async def test_a_worker_that_may_still_read_is_waited_for(own_api: Api) -> None:
    job = await prepared(own_api, await own_api.tenant(), state="cancelled", cleaned=False)
    assert await sweep(own_api) == 0
    assert len(names(own_api, job)) == 3


async def test_a_store_that_does_not_answer_is_asked_again(own_api: Api, monkeypatch: pytest.MonkeyPatch) -> None:
    job = await prepared(own_api, await own_api.tenant(), state="succeeded")

    async def broken(*_: object) -> None:
        raise OSError("the store does not answer")

    with monkeypatch.context() as patch:
        patch.setattr(purge, "delete_below", broken)
        assert await sweep(own_api) == 0
    assert len(names(own_api, job)) == 3
    assert await sweep(own_api) == 1
