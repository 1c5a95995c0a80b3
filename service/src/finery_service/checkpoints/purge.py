"""Objects of deleted checkpoints: gone soon after the commit, at the latest with the next sweep."""

from __future__ import annotations

import structlog
from obstore.store import ObjectStore
from sqlalchemy import func
from sqlalchemy.ext.asyncio import AsyncEngine
from sqlmodel import col, select, update

from finery_service.checkpoints.tables import CheckpointRow
from finery_service.db.engine import transaction
from finery_service.objects import delete_below

_AT_ONCE = 100

_log = structlog.get_logger("finery.api.checkpoints")


async def sweep(engine: AsyncEngine, store: ObjectStore) -> int:
    """Purges what a crash, or a store that did not answer, left over; returns how many checkpoints.

    `engine` connects as finery_system.
    """
    due = (col(CheckpointRow.deleted_at).is_not(None), col(CheckpointRow.purged_at).is_(None))
    async with transaction(engine) as session:
        statement = select(CheckpointRow).where(*due).order_by(col(CheckpointRow.deleted_at)).limit(_AT_ONCE)
        rows = (await session.exec(statement)).all()
    return sum([await purge(engine, store, row) for row in rows])


async def purge(engine: AsyncEngine, store: ObjectStore, row: CheckpointRow) -> bool:
    """Deletes the objects of a deleted checkpoint: its files, and what a job would resume from. Failing is only logged:
    the row still says that it is owed."""
    try:
        for prefix in (row.prefix, row.resume_prefix):
            await delete_below(store, prefix)
        async with transaction(engine) as session:
            await session.execute(
                update(CheckpointRow)
                .where(col(CheckpointRow.id) == row.id, col(CheckpointRow.deleted_at).is_not(None))
                .values(purged_at=func.clock_timestamp())
            )
    except Exception as problem:  # whatever a store or a database may raise
        _log.warning("checkpoint_not_purged", checkpoint=row.id, error=type(problem).__name__)
        return False
    return True
