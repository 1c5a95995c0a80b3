"""Taking a file in: from the socket to the object store in pieces, hashed and checked on the way.

The pieces go to a key of the upload's own. Only when all is well is the object moved to where it stays, so an upload
that breaks off, is too long or is refused leaves nothing behind.
"""

from __future__ import annotations

import hashlib
from collections.abc import AsyncIterator
from contextlib import suppress
from dataclasses import dataclass
from datetime import datetime

import obstore
from obstore.store import ObjectStore

from finery.data.check import Report
from finery_service.errors import ServiceError
from finery_service.files.checks import Limits, checking

_PIECE = 2**20
_CHUNK = 8 * 2**20
_IN_FLIGHT = 3


@dataclass(frozen=True)
class Received:
    key: str
    """Where it lies for now."""
    bytes: int
    sha256: str
    report: Report


async def receive(
    store: ObjectStore, key: str, data: AsyncIterator[bytes], limit: int, limits: Limits | None = None
) -> Received:
    """Stores `data` under `key`. Raises 413 beyond `limit` bytes; whatever it raises, nothing stays."""
    digest, size = hashlib.sha256(), 0
    async with checking(limits or Limits()) as check:

        async def checked() -> AsyncIterator[bytes]:
            nonlocal size
            async for piece in _pieces(data):
                size += len(piece)
                if size > limit:
                    raise file_too_large(limit)
                digest.update(piece)
                await check.feed(piece)
                yield piece

        await obstore.put_async(store, key, checked(), chunk_size=_CHUNK, max_concurrency=_IN_FLIGHT)
        try:
            report = await check.finish()
        except BaseException:
            await discard(store, key)
            raise
    return Received(key, size, digest.hexdigest(), report)


async def settle(store: ObjectStore, received: Received, key: str) -> None:
    """Moves the object to where it stays."""
    await obstore.rename_async(store, received.key, key, overwrite=True)


async def discard(store: ObjectStore, key: str) -> None:
    with suppress(FileNotFoundError):
        await obstore.delete_async(store, key)


async def sweep(store: ObjectStore, prefix: str, before: datetime) -> int:
    """Deletes what uploads left under `prefix` whose process died before that time; how many objects it was."""
    old = [
        item["path"] async for batch in obstore.list(store, prefix) for item in batch if item["last_modified"] < before
    ]
    for key in old:
        await discard(store, key)
    return len(old)


def file_too_large(limit: int) -> ServiceError:
    message = f"Expected a file of at most {limit} bytes, found a longer one; split it."
    return ServiceError(413, "file_too_large", message, param="file", details=[{"limit": limit}])


async def _pieces(data: AsyncIterator[bytes]) -> AsyncIterator[bytes]:
    piece = bytearray()
    async for chunk in data:
        piece += chunk
        if len(piece) >= _PIECE:
            yield bytes(piece)
            piece.clear()
    if piece:
        yield bytes(piece)
