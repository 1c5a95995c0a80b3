"""The catalogue of base models, the same for all tenants."""

from __future__ import annotations

import re
from collections.abc import Mapping
from datetime import datetime
from decimal import Decimal

from sqlalchemy.exc import IntegrityError
from sqlmodel.ext.asyncio.session import AsyncSession

from finery.types.ids import new_id
from finery.types.models import Model, ModelCreate
from finery.types.money import plain
from finery.types.pages import Page
from finery_service.clock import milliseconds
from finery_service.errors import ServiceError, not_found
from finery_service.http.paging import page_of, to_page
from finery_service.models import store
from finery_service.models.tables import ModelRow
from finery_service.usage import prices

_NAME_OR_ID = re.compile(r"[A-Za-z0-9._-]{1,256}")


async def create(session: AsyncSession, body: ModelCreate, now: datetime) -> Model:
    """Raises 409 if the name is taken."""
    row = ModelRow(
        id=new_id("mdl", milliseconds(now)),
        name=body.name,
        source=body.source.model_dump(mode="json"),
        max_length=body.max_length,
        parameters=body.parameters,
        created_at=now,
    )
    try:
        async with session.begin_nested():
            session.add(row)
    except IntegrityError:
        message = f"Expected a name that is free, found {body.name!r} in the catalogue; choose another one."
        raise ServiceError(409, "model_exists", message, param="name") from None
    return _to_model(row, await _prices(session, now))


async def find(session: AsyncSession, name_or_id: str) -> ModelRow | None:
    """By name or id; None if there is no such model."""
    return await store.find(session, name_or_id) if _NAME_OR_ID.fullmatch(name_or_id) else None


async def get(session: AsyncSession, name_or_id: str, now: datetime) -> Model:
    row = await find(session, name_or_id)
    if row is None:
        raise not_found("model", name_or_id)
    return _to_model(row, await _prices(session, now))


async def list_page(session: AsyncSession, now: datetime, *, after: str | None, limit: int) -> Page[Model]:
    rows, has_more = await page_of(session, ModelRow, after=after, limit=limit)
    book = await _prices(session, now)
    return to_page([_to_model(row, book) for row in rows], has_more)


async def _prices(session: AsyncSession, now: datetime) -> dict[str, Decimal]:
    return prices.parse((await prices.in_force(session, now)).prices)


def _to_model(row: ModelRow, book: Mapping[str, Decimal]) -> Model:
    return Model(
        id=row.id,
        name=row.name,
        max_length=row.max_length,
        parameters=row.parameters,
        prices={sku: plain(price) for sku, price in book.items()},
        created_at=row.created_at,
    )
