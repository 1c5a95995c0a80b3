"""Objects of deleted checkpoints: gone soon after the commit, at the latest with the next sweep."""

from __future__ import annotations

import structlog
from obstore.store import ObjectStore
from sqlalchemy.ext.asyncio import AsyncEngine

from finery_service.checkpoints.tables import CheckpointRow
from finery_service.db import deleted
from finery_service.objects import delete_below

_log = structlog.get_logger("finery.api.checkpoints")


async def sweep(engine: AsyncEngine, store: ObjectStore) -> int:
    """Purges what a crash, or a store that did not answer, left over; returns how many checkpoints.

    `engine` connects as finery_system.
    """
    return sum([await purge(engine, store, row) for row in await deleted.owed(engine, CheckpointRow)])


async def purge(engine: AsyncEngine, store: ObjectStore, row: CheckpointRow) -> bool:
    """Deletes the objects of a deleted checkpoint: its files, and what a job would resume from. Failing is only logged:
    the row still says that it is owed."""
    try:
        for prefix in (row.prefix, row.resume_prefix):
            await delete_below(store, prefix)
        await deleted.settle(engine, row)
    except Exception as problem:  # whatever a store or a database may raise
        _log.warning("checkpoint_not_purged", checkpoint=row.id, error=type(problem).__name__)
        return False
    return True
