"""Objects of deleted files: gone soon after the commit, at the latest with the next sweep.

Files of the same content share the object of the first of them. It goes with the last of them: who joins it holds the
row of a live one until it commits, so once none is live, none will be.
"""

from __future__ import annotations

import structlog
from obstore.store import ObjectStore
from sqlalchemy.ext.asyncio import AsyncEngine

from finery_service.db import deleted
from finery_service.db.engine import transaction
from finery_service.files import store as rows
from finery_service.files.intake import discard
from finery_service.files.tables import FileRow

log = structlog.get_logger("finery.api.files")


async def sweep(engine: AsyncEngine, store: ObjectStore) -> int:
    """Purges what a crash, or a store that did not answer, left over; returns how many files.

    `engine` connects as finery_system.
    """
    return sum([await purge(engine, store, row) for row in await deleted.owed(engine, FileRow)])


async def purge(engine: AsyncEngine, store: ObjectStore, row: FileRow) -> bool:
    """Deletes the object of a deleted file if no other one has it. Failing is only logged: the row still says that it
    is owed."""
    try:
        async with transaction(engine) as session:
            shared = await rows.is_shared(session, row)
        if not shared:
            await discard(store, row.object_key)
        await deleted.settle(engine, row)
    except Exception as problem:  # whatever a store or a database may raise
        log.warning("file_not_purged", file=row.id, error=type(problem).__name__)
        return False
    return True
