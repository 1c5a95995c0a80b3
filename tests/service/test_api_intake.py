"""Taking a file in, below the form: memory, limits, what is left behind."""

from __future__ import annotations

import asyncio
import tracemalloc
from collections.abc import AsyncIterator
from datetime import UTC, datetime

import obstore
import pytest

from finery_service.errors import ServiceError
from finery_service.files.intake import receive, sweep
from finery_testing.api import Api


async def test_upload_is_never_held_whole_in_memory(api: Api) -> None:
    taken = 0

    async def source() -> AsyncIterator[bytes]:
        nonlocal taken
        for _ in range(40):
            taken += 1
            yield b"x" * 2**20

    tracemalloc.start()
    received = await receive(api.app.state.services.store, "uploads/big", source(), 2**30)
    peak = tracemalloc.get_traced_memory()[1]
    tracemalloc.stop()
    assert received.bytes == taken * 2**20 == 40 * 2**20
    assert peak < 30 * 2**20, "Python never holds more than a few pieces and one line"
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
