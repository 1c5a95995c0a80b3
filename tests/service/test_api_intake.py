"""Taking a file in, below the form: memory, limits, what is left behind."""

from __future__ import annotations

import asyncio
import tracemalloc
from collections.abc import AsyncIterator
from dataclasses import replace
from datetime import UTC, datetime, timedelta

import obstore
import pytest

from finery_service import housekeeping
from finery_service.errors import ServiceError
from finery_service.files.intake import receive, sweep
from finery_testing.api import CHAT_ROW, Api, jsonl


async def test_upload_is_never_held_whole_in_memory(api: Api) -> None:
    taken = 0

    async def source() -> AsyncIterator[bytes]:
        nonlocal taken
        for _ in range(100):
            taken += 1
            yield b"x" * 2**20

    tracemalloc.start()
    received = await receive(api.app.state.services.store, "uploads/big", source(), 2**30)
    peak = tracemalloc.get_traced_memory()[1]
    tracemalloc.stop()
    assert received.bytes == taken * 2**20 == 100 * 2**20
    assert peak < 50 * 2**20, "three chunks of 8 MiB on their way to a slow store, one being filled, one line"
    await obstore.delete_async(api.app.state.services.store, "uploads/big")


async def test_limit_stops_the_source(api: Api) -> None:
    pulled = 0

    async def endless() -> AsyncIterator[bytes]:
        nonlocal pulled
        while True:
            pulled += 1
            yield b"x" * 2**20
            await asyncio.sleep(0)

    with pytest.raises(ServiceError):
        await receive(api.app.state.services.store, "uploads/endless", endless(), 3 * 2**20)
    assert pulled < 10
    assert "uploads/endless" not in api.objects()


async def test_uploads_of_processes_that_died_are_swept_by_age(api: Api) -> None:
    store = api.app.state.services.store
    for key in ("uploads/ten_x/file_1", "ten_x/files/abc"):
        await obstore.put_async(store, key, b"x")
    long_ago, soon = datetime(2020, 1, 1, tzinfo=UTC), datetime(2100, 1, 1, tzinfo=UTC)
    assert await sweep(store, "uploads", long_ago) == 0
    assert await sweep(store, "uploads", soon) == 1
    assert [key for key in api.objects() if "ten_x" in key] == ["ten_x/files/abc"]


async def test_house_keeping_leaves_uploads_of_the_last_day(own_api: Api) -> None:
    services = own_api.app.state.services
    await obstore.put_async(services.store, "uploads/ten_x/file_1", b"x")
    for age, left in ((timedelta(hours=23), 1), (timedelta(hours=25), 0)):
        later = replace(services, clock=lambda age=age: datetime.now(UTC) + age)
        await housekeeping.sweep(later)
        assert len(own_api.objects()) == left


@pytest.mark.parametrize("size", [2**20, 2**20 + 1])
async def test_e16_the_limit_of_a_text_field_is_a_mebibyte_and_named(own_api: Api, size: int) -> None:
    door = await own_api.tenant()
    services = own_api.app.state.services
    changes = {"max_body_bytes": type(services.settings).model_fields["max_body_bytes"].default}
    object.__setattr__(services, "settings", services.settings.model_copy(update=changes))
    fields = {"purpose": "x" * size}
    answer = await door.client.post("/v1/files", files={"file": ("a.jsonl", jsonl(CHAT_ROW))}, data=fields)
    if size == 2**20:
        assert answer.status_code == 201, answer.text
        return
    error = answer.json()["error"]
    assert (answer.status_code, error["code"], error["param"]) == (413, "field_too_large", "purpose")
    assert "1048576" in error["message"]


async def test_e16_a_file_without_a_name_is_refused_before_it_is_read(api: Api) -> None:
    door = await api.tenant()
    pulled = 0

    async def body() -> AsyncIterator[bytes]:
        nonlocal pulled
        yield b'--XX\r\nContent-Disposition: form-data; name="file"\r\n\r\n'
        for _ in range(100):
            pulled += 1
            yield jsonl(CHAT_ROW) * 100

    headers = {"content-type": "multipart/form-data; boundary=XX"}
    answer = await door.client.post("/v1/files", content=body(), headers=headers)
    assert (answer.status_code, answer.json()["error"]["code"]) == (400, "missing_filename")
    assert pulled <= 100
