"""Objects of deleted files: gone soon after the commit, at the latest with the next sweep.

Files of the same content share the object of the first of them. It goes with the last of them: who joins it holds the
row of a live one until it commits, so once none is live, none will be.
"""

from __future__ import annotations

import structlog
from obstore.store import ObjectStore
from sqlalchemy import func
from sqlalchemy.ext.asyncio import AsyncEngine
from sqlmodel import col, select, update

from finery_service.db.engine import transaction
from finery_service.files.intake import discard
from finery_service.files.tables import FileRow

_AT_ONCE = 100

log = structlog.get_logger("finery.api.files")


async def sweep(engine: AsyncEngine, store: ObjectStore) -> int:
    """Purges what a crash, or a store that did not answer, left over; returns how many files.

    `engine` connects as finery_system.
    """
    due = (col(FileRow.deleted_at).is_not(None), col(FileRow.purged_at).is_(None))
    async with transaction(engine) as session:
        statement = select(FileRow).where(*due).order_by(col(FileRow.deleted_at)).limit(_AT_ONCE)
        rows = (await session.exec(statement)).all()
    return sum([await purge(engine, store, row) for row in rows])


async def purge(engine: AsyncEngine, store: ObjectStore, row: FileRow) -> bool:
    """Deletes the object of a deleted file if no other one has it. Failing is only logged: the row still says that it
    is owed."""
    try:
        if not await _is_shared(engine, row):
            await discard(store, row.object_key)
        async with transaction(engine) as session:
            await session.execute(
                update(FileRow)
                .where(col(FileRow.id) == row.id, col(FileRow.deleted_at).is_not(None))
                .values(purged_at=func.clock_timestamp())
            )
    except Exception as problem:  # whatever a store or a database may raise
        log.warning("file_not_purged", file=row.id, error=type(problem).__name__)
        return False
    return True


async def _is_shared(engine: AsyncEngine, row: FileRow) -> bool:
    async with transaction(engine) as session:
        statement = select(FileRow.id).where(
            FileRow.tenant_id == row.tenant_id,
            FileRow.sha256 == row.sha256,
            FileRow.object_key == row.object_key,
            col(FileRow.deleted_at).is_(None),
        )
        return (await session.exec(statement.limit(1))).first() is not None
