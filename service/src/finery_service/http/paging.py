"""Lists: a total order on (created_at, id), so that equal times and inserts lose and repeat nothing."""

from __future__ import annotations

import re
from collections.abc import Sequence
from typing import Annotated, Any, TypeVar

from fastapi import Query
from sqlalchemy import ColumnElement, Text, cast, func, tuple_
from sqlalchemy.orm import Mapped
from sqlmodel import SQLModel, col, select
from sqlmodel.ext.asyncio.session import AsyncSession

from finery.types.base import Resource
from finery.types.pages import Page
from finery_service.errors import ServiceError

R = TypeVar("R", bound=SQLModel)
T = TypeVar("T", bound=Resource)

After = Annotated[str | None, Query(description="Id of the last object of the page before.")]
Limit = Annotated[int, Query(ge=1, le=100, description="Objects per page.")]

PAGE_BYTES = 4 * 2**20
"""A page of what may be large ends early, after the object with which it reaches this."""
_ID = re.compile(r"[a-z]{2,5}_[0-9a-zA-Z_-]{1,64}")


def is_id(text: str) -> bool:
    """Whether `text` may be an id at all; what is not, need not (and must not) reach the database."""
    return _ID.fullmatch(text) is not None


async def page_of(
    session: AsyncSession,
    kind: type[R],
    *where: ColumnElement[bool] | bool,
    after: str | None,
    limit: int,
    oldest_first: bool = False,
    filters: Sequence[ColumnElement[bool]] = (),
    large: Mapped[Any] | None = None,
) -> tuple[list[R], bool]:
    """Up to `limit` rows that follow the row with the id `after`, and whether more follow; fewer where what the column
    `large` holds adds up to `PAGE_BYTES`.

    `where` says whose list it is; `filters` say what of it is wanted. The row `after` need not pass the filters (any
    more): it may have changed or been deleted since it was the last of its page. Raises 400 for an `after` that is no
    id of this list.
    """
    table: Any = kind
    key = tuple_(col(table.created_at), col(table.id))
    statement = select(kind).where(*where, *filters)
    if after is not None:
        cursor = await _cursor(session, table, where, after)
        statement = statement.where(key > cursor if oldest_first else key < cursor)
    order = [col(table.created_at), col(table.id)]
    statement = statement.order_by(*(order if oldest_first else [column.desc() for column in order]))
    statement = statement.limit(limit + 1)
    if large is not None:
        return await _light(session, table, statement, large, limit)
    rows = (await session.exec(statement)).all()
    return list(rows[:limit]), len(rows) > limit


async def _light(session: AsyncSession, table: Any, statement: Any, large: Any, limit: int) -> tuple[list[Any], bool]:
    """Weighs the rows where they lie: what is not shown is not read into this process."""
    size = func.octet_length(func.coalesce(cast(large, Text), ""))
    found = (await session.execute(statement.with_only_columns(table.id, size))).all()
    taken: list[str] = []
    room = PAGE_BYTES
    for id_, bytes_ in found[:limit]:
        if room <= 0:
            break
        taken.append(id_)
        room -= bytes_
    rows = {row.id: row for row in (await session.exec(select(table).where(col(table.id).in_(taken)))).all()}
    return [rows[id_] for id_ in taken], len(found) > len(taken)


async def _cursor(session: AsyncSession, table: Any, where: Sequence[Any], after: str) -> Any:
    found = None
    if is_id(after):
        statement = select(table.created_at, table.id).where(*where, table.id == after)
        found = (await session.exec(statement)).first()
    if found is None:
        message = "Expected the id of an object of this list, found another text; pass a page's last_id."
        raise ServiceError(400, "invalid_cursor", message, param="after")
    return tuple_(*found)


def to_page(data: Sequence[T], has_more: bool) -> Page[T]:
    last_id = getattr(data[-1], "id", None) if data else None
    return Page(data=tuple(data), has_more=has_more, last_id=last_id)
