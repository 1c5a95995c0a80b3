"""Rows with `deleted_at`, `purged_at` (files, checkpoints): gone for their owner, their objects owed to the purge."""

from __future__ import annotations

from typing import Any, TypeVar

from sqlalchemy import func, update
from sqlalchemy.ext.asyncio import AsyncEngine
from sqlmodel import SQLModel, col, select

from finery_service.db.engine import transaction

_AT_ONCE = 100

R = TypeVar("R", bound=SQLModel)


async def owed(engine: AsyncEngine, kind: type[R]) -> list[R]:
    """The first of all tenants' rows whose objects are still there. `engine` connects as finery_system."""
    table: Any = kind
    statement = select(kind).where(col(table.deleted_at).is_not(None), col(table.purged_at).is_(None))
    async with transaction(engine) as session:
        return list((await session.exec(statement.order_by(col(table.deleted_at)).limit(_AT_ONCE))).all())


async def settle(engine: AsyncEngine, row: SQLModel) -> None:
    """The row's objects are gone."""
    table: Any = type(row)
    statement = update(table).where(table.id == row.id, table.deleted_at.is_not(None))  # type: ignore[attr-defined]
    async with transaction(engine) as session:
        await session.execute(statement.values(purged_at=func.clock_timestamp()))
