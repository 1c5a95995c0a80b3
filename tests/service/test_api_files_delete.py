"""DELETE /v1/files/{id}: gone for its owner at once, its object soon after, and never that of a living file."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable
from typing import Any

import httpx
import pytest
from sqlalchemy import text
from sqlmodel import select

from finery_service.db.engine import transaction
from finery_service.db.tables import FileRow
from finery_service.files import purge, service
from finery_testing import factories
from finery_testing.api import CHAT_ROW, Api, Door, jsonl

GOOD = jsonl(CHAT_ROW)


async def upload(door: Door, content: bytes = GOOD) -> str:
    answer = await door.upload(content)
    assert answer.status_code == 201, answer.text
    return str(answer.json()["id"])


async def delete(door: Door, file: str) -> httpx.Response:
    return await door.client.delete(f"/v1/files/{file}")


def kept(api: Api, door: Door) -> list[str]:
    return [key for key in api.objects() if door.tenant.id in key]


async def row(api: Api, file: str) -> FileRow:
    async with transaction(api.system_engine) as session:
        return (await session.exec(select(FileRow).where(FileRow.id == file))).one()


async def content_of(api: Api, file: str) -> bytes:
    return (api.store_folder / (await row(api, file)).object_key).read_bytes()


async def test_a_deleted_file_is_gone_from_everywhere_and_its_row_stays(api: Api) -> None:
    door = await api.tenant()
    file, other = await upload(door), await upload(door, GOOD * 2)
    answer = await delete(door, file)
    assert (answer.status_code, answer.json()) == (200, {"object": "file", "id": file, "deleted": True})
    for again in (await delete(door, file), await door.get(f"/v1/files/{file}")):
        assert (again.status_code, again.json()["error"]["code"]) == (404, "file_not_found")
    assert [found["id"] for found in (await door.get("/v1/files")).json()["data"]] == [other]
    for param in ("training_file", "validation_file"):
        fields: dict[str, Any] = {"training_file": other, param: file}
        job = await door.job(**fields)
        assert (job.status_code, job.json()["error"]["code"]) == (400, "file_not_found")
        assert job.json()["error"]["param"] == param
    left = await row(api, file)
    assert left.deleted_at == api.clock()
    assert left.purged_at is not None
    assert kept(api, door) == [(await row(api, other)).object_key]


async def test_unknown_ids_and_those_of_other_tenants_answer_the_same(api: Api) -> None:
    door, other = await api.tenant(), await api.tenant("other")
    file = await upload(door)
    for id_ in (file, "file_unknown", "job_1", "x" * 300):
        answer = await delete(other, id_)
        assert (answer.status_code, answer.json()["error"]["code"]) == (404, "file_not_found")
    assert (await door.get(f"/v1/files/{file}")).status_code == 200


@pytest.mark.parametrize("param", ["training_file_id", "validation_file_id"])
@pytest.mark.parametrize("state", ["validating", "queued", "starting", "running", "paused"])
async def test_a_file_that_an_open_job_reads_is_kept(api: Api, state: str, param: str) -> None:
    door = await api.tenant()
    file = await upload(door)
    given: dict[str, Any] = {} if param == "training_file_id" else {"validation_file_id": file}
    source = await row(api, file) if param == "training_file_id" else None
    jobs = [
        await factories.job(api.system_engine, door.tenant, now=api.clock(), training_file=source, state=state, **given)
        for _ in range(7)
    ]
    answer = await delete(door, file)
    error = answer.json()["error"]
    assert (answer.status_code, error["code"]) == (409, "file_in_use")
    assert answer.headers["x-should-retry"] == "false"
    named = [detail["job"] for detail in error["details"]]
    assert len(named) == 5
    assert set(named) <= {job.id for job in jobs}
    assert all(id_ in error["message"] for id_ in named)
    assert await content_of(api, file) == GOOD


@pytest.mark.parametrize("state", ["succeeded", "failed", "cancelled"])
async def test_a_job_that_has_ended_needs_its_file_no_more(api: Api, state: str) -> None:
    door = await api.tenant()
    file = await upload(door)
    ended: dict[str, Any] = {"state": state, "finished_at": api.clock()}
    job = await factories.job(
        api.system_engine, door.tenant, now=api.clock(), training_file=await row(api, file), **ended
    )
    assert (await delete(door, file)).status_code == 200
    assert (await door.get(f"/v1/jobs/{job.id}")).json()["training_file"] == file


# ---- objects that several files share


async def test_files_of_one_content_share_an_object_that_goes_with_the_last(api: Api) -> None:
    door = await api.tenant()
    files = [await upload(door) for _ in range(3)]
    assert len(kept(api, door)) == 1
    for n, file in enumerate(files):
        assert (await delete(door, file)).status_code == 200
        for living in files[n + 1 :]:
            assert await content_of(api, living) == GOOD
    assert kept(api, door) == []
    again = await upload(door)
    assert await content_of(api, again) == GOOD
    other = await api.tenant("other")
    assert len(kept(api, other)) == 0
    await upload(other)
    assert len(kept(api, other)) == 1, "tenants share nothing"


async def test_an_upload_while_its_twin_is_being_deleted_keeps_its_own_object(api: Api) -> None:
    door = await api.tenant()
    twin = await upload(door)
    async with transaction(api.app.state.services.app_engine, door.tenant.id) as session:
        deleted = await service.delete(session, door.tenant.id, twin, api.clock())
        task = asyncio.create_task(upload(door))
        await waiting_for_a_lock(api)  # the upload found the twin alive, and wants to hold it
        assert not task.done()
    file = await task
    await purge.purge(api.system_engine, api.app.state.services.store, deleted)
    assert await content_of(api, file) == GOOD
    assert len(kept(api, door)) == 1


async def test_a_delete_while_a_twin_is_being_inserted_leaves_the_object(
    api: Api, monkeypatch: pytest.MonkeyPatch
) -> None:
    door = await api.tenant()
    first = await upload(door)
    holds, goes_on = asyncio.Event(), asyncio.Event()
    insert: Callable[..., Awaitable[Any]] = service._insert

    async def slowly(session: Any, row: FileRow) -> Any:
        holds.set()
        await goes_on.wait()
        return await insert(session, row)

    monkeypatch.setattr(service, "_insert", slowly)
    uploading = asyncio.create_task(upload(door))
    await holds.wait()
    deleting = asyncio.create_task(delete(door, first))
    await waiting_for_a_lock(api)
    goes_on.set()
    second = await uploading
    assert (await deleting).status_code == 200
    assert await content_of(api, second) == GOOD
    assert (await row(api, first)).purged_at is not None


@pytest.mark.parametrize("what", ["job", "preview"])
async def test_a_delete_while_a_job_or_preview_is_being_created_waits_and_is_refused(
    api: Api, monkeypatch: pytest.MonkeyPatch, what: str
) -> None:
    from finery_service.jobs import store as jobs

    door = await api.tenant()
    file = await upload(door)
    holds, goes_on = asyncio.Event(), asyncio.Event()
    insert: Callable[..., Awaitable[None]] = jobs.insert

    async def slowly(*arguments: Any) -> None:
        holds.set()
        await goes_on.wait()
        await insert(*arguments)

    monkeypatch.setattr(jobs, "insert", slowly)
    preview = {"model": factories.MODEL_NAME}
    request = door.job(training_file=file) if what == "job" else door.post(f"/v1/files/{file}/previews", preview)
    creating = asyncio.create_task(request)
    await holds.wait()
    deleting = asyncio.create_task(delete(door, file))
    await waiting_for_a_lock(api)
    goes_on.set()
    assert (await creating).status_code == 201
    refused = (await deleting).json()["error"]
    assert refused["code"] == "file_in_use"
    assert refused["details"] == [{"job": (await creating).json()["id"]}]
    assert await content_of(api, file) == GOOD


async def waiting_for_a_lock(api: Api) -> None:
    """Until some transaction waits for another one to end: then the order of things is fixed."""
    waiting = text("select count(*) from pg_locks where locktype = 'transactionid' and not granted")
    while True:
        async with transaction(api.system_engine) as session:
            if (await session.execute(waiting)).scalar_one():
                return
        await asyncio.sleep(0.01)


# ---- what a crash leaves


async def test_what_was_not_purged_at_once_goes_with_a_sweep(own_api: Api, monkeypatch: pytest.MonkeyPatch) -> None:
    door = await own_api.tenant()
    objects = own_api.app.state.services.store
    file, shared, living = await upload(door), await upload(door, GOOD * 2), await upload(door, GOOD * 2)

    async def broken(*_: Any, **__: Any) -> None:
        raise OSError("the store does not answer")

    with monkeypatch.context() as patch:
        patch.setattr(purge, "discard", broken)
        for deleted in (file, shared):
            assert (await delete(door, deleted)).status_code == 200
        assert await purge.sweep(own_api.system_engine, objects) == 0
    assert (await row(own_api, file)).purged_at is None
    assert len(kept(own_api, door)) == 2
    assert await purge.sweep(own_api.system_engine, objects) == 1, "the shared one was nothing to purge"
    assert kept(own_api, door) == [(await row(own_api, living)).object_key]
    assert (await row(own_api, file)).purged_at is not None
    assert await purge.sweep(own_api.system_engine, objects) == 0


async def test_an_upload_that_fails_after_its_object_was_moved_leaves_nothing(
    own_api: Api, monkeypatch: pytest.MonkeyPatch
) -> None:
    door = await own_api.tenant()

    async def broken(*_: Any) -> None:
        raise OSError("out of luck")

    with monkeypatch.context() as patch:
        patch.setattr(service, "_insert", broken)
        assert (await door.upload(GOOD)).status_code == 500
    assert kept(own_api, door) == []


# ---- lists


async def test_lists_go_on_past_a_deleted_cursor_and_can_be_of_one_project(api: Api) -> None:
    door, other = await api.tenant(), await api.tenant("other")
    for n in range(1, 6):
        await upload(door, GOOD * n)
    whole = [file["id"] for file in (await door.get("/v1/files")).json()["data"]]
    page = (await door.get("/v1/files", params={"limit": 2})).json()
    assert [file["id"] for file in page["data"]] == whole[:2]
    await delete(door, page["last_id"])
    rest = (await door.get("/v1/files", params={"after": page["last_id"]})).json()
    assert [file["id"] for file in rest["data"]] == whole[2:]
    mine = (await door.get("/v1/files", params={"project": door.tenant.project_id})).json()
    assert len(mine["data"]) == 4
    for project in (other.tenant.project_id, "proj_unknown", "x"):
        answer = await door.get("/v1/files", params={"project": project})
        assert (answer.status_code, answer.json()["error"]["code"]) == (404, "project_not_found")
