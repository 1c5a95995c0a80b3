"""Deleting checkpoints: refused while something needs them, then gone everywhere, objects included."""

from __future__ import annotations

import asyncio
from datetime import timedelta
from typing import Any

import httpx
import obstore
import pytest
from sqlalchemy import text

from finery_service.checkpoints import purge
from finery_service.db.engine import transaction
from finery_service.db.tables import CheckpointRow, JobRow
from finery_testing import control, factories
from finery_testing.api import Api, Door, checkpoint


async def ended(api: Api, door: Door, **values: Any) -> JobRow:
    return await factories.job(api.system_engine, door.tenant, now=api.clock(), state="succeeded", **values)


async def stored(api: Api, job: JobRow, step: int = 1, **values: Any) -> CheckpointRow:
    """With a file and a resume bundle in the store."""
    file = {"path": "a/adapter_model.safetensors", "bytes": 3, "sha256": "0" * 64}
    row = await checkpoint(api.system_engine, job, now=api.clock(), step=step, files=[file], bytes=3, **values)
    for key in (f"{row.prefix}{file['path']}", f"{row.resume_prefix}index.json"):
        await obstore.put_async(api.app.state.services.store, key, b"abc")
    return row


async def purged(api: Api, row: CheckpointRow) -> bool:
    async with transaction(api.system_engine) as session:
        return (await session.get_one(CheckpointRow, (row.tenant_id, row.id))).purged_at is not None


def objects(api: Api, job: JobRow) -> list[str]:
    return [key for key in api.objects() if job.id in key]


async def test_a_deleted_checkpoint_is_gone_everywhere(api: Api) -> None:
    door = await api.tenant()
    job = await ended(api, door)
    gone, stays = await stored(api, job, 1), await stored(api, job, 11)
    answer = await door.client.delete(f"/v1/checkpoints/{gone.id}")
    assert (answer.status_code, answer.json()) == (200, {"object": "checkpoint", "id": gone.id, "deleted": True})
    for path in ("", "/files/a/adapter_model.safetensors"):
        missing = await door.get(f"/v1/checkpoints/{gone.id}{path}")
        assert (missing.status_code, missing.json()["error"]["code"]) == (404, "checkpoint_not_found")
    assert (await door.client.delete(f"/v1/checkpoints/{gone.id}")).status_code == 404
    listed = (await door.get(f"/v1/checkpoints?job={job.id}")).json()["data"]
    assert [item["id"] for item in listed] == [stays.id]
    assert len(objects(api, job)) == 2, "those of the other one"
    assert await purged(api, gone)
    assert (await door.get(f"/v1/jobs/{job.id}")).status_code == 200


async def test_unknown_and_foreign_checkpoints_answer_alike(api: Api) -> None:
    door, stranger = await api.tenant(), await api.tenant()
    theirs = await stored(api, await ended(api, stranger))
    for id_ in (theirs.id, "ckpt_unknown", "%00", "x" * 300):
        answer = await door.client.delete(f"/v1/checkpoints/{id_}")
        assert (answer.status_code, answer.json()["error"]["code"]) == (404, "checkpoint_not_found")
    assert (await stranger.get(f"/v1/checkpoints/{theirs.id}")).status_code == 200


async def in_use(door: Door, row: CheckpointRow, **who: str) -> None:
    answer = await door.client.delete(f"/v1/checkpoints/{row.id}")
    error = answer.json()["error"]
    assert (answer.status_code, error["code"]) == (409, "checkpoint_in_use"), error
    [(kind, id_)] = who.items()
    assert error["details"][0][kind] == id_
    assert f"{kind} {id_}" in error["message"]
    assert answer.headers["x-should-retry"] == "false"
    assert (await door.get(f"/v1/checkpoints/{row.id}")).status_code == 200


@pytest.mark.parametrize("state", ["validating", "queued", "starting", "running", "paused"])
async def test_the_last_checkpoint_of_an_open_job_stays_and_older_ones_may_go(api: Api, state: str) -> None:
    door = await api.tenant()
    job = await factories.job(api.system_engine, door.tenant, now=api.clock(), state=state)
    older, last = await stored(api, job, 1), await stored(api, job, 2)
    update = "update jobs set last_checkpoint_id = :last where id = :job"
    await control.execute(api.system_engine, update, last=last.id, job=job.id)
    await in_use(door, last, job=job.id)
    assert (await door.client.delete(f"/v1/checkpoints/{older.id}")).status_code == 200


async def test_what_an_open_job_starts_from_stays_until_its_end(api: Api) -> None:
    door = await api.tenant()
    start, under = [await stored(api, await ended(api, door)) for _ in range(2)]
    child = (await door.job(from_checkpoint=start.id)).json()["id"]
    base = "update jobs set base = cast(:base as jsonb) where id = :job"
    part = f'[{{"checkpoint": "{under.id}", "kind": "full"}}]'
    await control.execute(api.system_engine, base, base=part, job=child)
    for row in (start, under):
        await in_use(door, row, job=child)
    end = "update jobs set state = 'cancelled', finished_at = created_at where id = :job"
    await control.execute(api.system_engine, end, job=child)
    for row in (start, under):
        assert (await door.client.delete(f"/v1/checkpoints/{row.id}")).status_code == 200


async def test_what_another_checkpoint_lies_on_goes_after_it(api: Api) -> None:
    door = await api.tenant()
    under = await stored(api, await ended(api, door))
    on_top = await stored(api, await ended(api, door, base=[{"checkpoint": under.id, "kind": "merge"}]))
    await in_use(door, under, checkpoint=on_top.id)
    for row in (on_top, under):
        assert (await door.client.delete(f"/v1/checkpoints/{row.id}")).status_code == 200


async def test_a_create_and_a_delete_that_race_never_both_win(api: Api) -> None:
    door = await api.tenant()
    file = await door.file_id()
    for _ in range(10):
        row = await stored(api, await ended(api, door))
        created, deleted = await asyncio.gather(
            door.job(from_checkpoint=row.id, training_file=file), door.client.delete(f"/v1/checkpoints/{row.id}")
        )
        assert (created.status_code, deleted.status_code) in {(201, 409), (400, 200)}


async def test_what_a_crash_left_is_purged_by_the_sweep(api: Api, monkeypatch: pytest.MonkeyPatch) -> None:
    door = await api.tenant()
    job = await ended(api, door)
    row = await stored(api, job)

    async def broken(*_: object) -> None:
        raise OSError("the store does not answer")

    with monkeypatch.context() as patch:
        patch.setattr(purge, "delete_below", broken)
        assert (await door.client.delete(f"/v1/checkpoints/{row.id}")).status_code == 200, "the row decides"
        assert await purge.sweep(api.system_engine, api.app.state.services.store) == 0
    assert len(objects(api, job)) == 2
    assert not await purged(api, row)
    assert await purge.sweep(api.system_engine, api.app.state.services.store) == 1
    assert objects(api, job) == []
    assert await purged(api, row)
    assert await purge.sweep(api.system_engine, api.app.state.services.store) == 0


async def test_best_of_rl_is_the_highest_reward_the_earliest_of_equals(api: Api) -> None:
    door = await api.tenant()
    job = await factories.job(api.system_engine, door.tenant, now=api.clock(), method="rl", state="running")
    rewards = (-0.5, None, 0.75, 0.75, 0.0)
    rows = [
        await checkpoint(api.system_engine, job, now=api.clock(), step=step, validation_reward=reward)
        for step, reward in enumerate(rewards, start=1)
    ]
    listed = (await door.get(f"/v1/checkpoints?job={job.id}")).json()["data"]
    assert {item["step"]: (item["validation_reward"], item["best"]) for item in listed} == {
        step: (reward, step == 3) for step, reward in enumerate(rewards, start=1)
    }
    assert (await door.get(f"/v1/jobs/{job.id}")).json()["best_checkpoint"] == rows[2].id


async def test_best_is_the_lowest_finite_loss_the_earliest_of_equals_and_never_a_deleted_one(api: Api) -> None:
    door = await api.tenant()
    job = await ended(api, door)
    losses = [2.0, 1.5, 1.0, 1.0, None]
    rows = [
        await stored(api, job, step, validation_loss=loss, created_at=api.clock() + timedelta(seconds=step))
        for step, loss in enumerate(losses, 1)
    ]
    other = await stored(api, await ended(api, door), validation_loss=9.0)

    async def best() -> tuple[list[bool], str | None]:
        listed = (await door.get(f"/v1/checkpoints?job={job.id}")).json()["data"]
        return [item["best"] for item in listed], (await door.get(f"/v1/jobs/{job.id}")).json()["best_checkpoint"]

    assert await best() == ([False, False, True, False, False], rows[2].id)
    assert (await door.get(f"/v1/checkpoints/{rows[2].id}")).json()["best"]
    assert (await door.get(f"/v1/checkpoints/{other.id}")).json()["best"], "each job has its own"
    await door.client.delete(f"/v1/checkpoints/{rows[2].id}")
    assert await best() == ([False, False, True, False], rows[3].id)
    shown: httpx.Response = await door.get(f"/v1/checkpoints/{rows[1].id}")
    assert (shown.json()["kind"], shown.json()["validation_loss"]) == ("adapter", 1.5)


async def test_the_application_may_mark_and_never_erase_or_unpurge(api: Api) -> None:
    door = await api.tenant()
    row = await stored(api, await ended(api, door))
    for statement in ("delete from checkpoints", "update checkpoints set purged_at = now()"):
        with pytest.raises(Exception, match="permission denied"):
            async with transaction(api.app.state.services.app_engine, door.tenant.id) as session:
                await session.execute(text(statement))
    assert not await purged(api, row)
