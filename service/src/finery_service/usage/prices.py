"""Prices: a book has an effective date and is pinned to a job at submit. Money is never a float."""

from __future__ import annotations

from collections.abc import Mapping
from datetime import datetime
from decimal import Decimal

from sqlmodel import col, select
from sqlmodel.ext.asyncio.session import AsyncSession

from finery.types.money import cumulative_nanodollars, usd
from finery_service.usage.tables import PriceBookRow

Prices = Mapping[str, Decimal]
"""US dollars per million units, by SKU."""


def parse(prices: Mapping[str, str]) -> dict[str, Decimal]:
    """A book's JSON as `Decimal`s."""
    return {sku: Decimal(price) for sku, price in prices.items()}


def cost_nanodollars(quantities: Mapping[str, int], prices: Mapping[str, Decimal | str]) -> int:
    """What `quantities` (units by SKU) cost, whole nano-dollars: each SKU's total is rounded once, half-even."""
    missing = sorted(set(quantities) - set(prices))
    if missing:
        raise ValueError(f"expected a price of every SKU, found none of {', '.join(missing)}; add it to the price book")
    return sum(cumulative_nanodollars(units, Decimal(prices[sku])) for sku, units in quantities.items())


def cost_usd(quantities: Mapping[str, int], prices: Mapping[str, Decimal | str]) -> Decimal:
    """The same in exact US dollars."""
    return usd(cost_nanodollars(quantities, prices))


async def in_force(session: AsyncSession, now: datetime) -> PriceBookRow:
    """The latest book that is effective by `now`: the one to pin to a job that is submitted now."""
    statement = (
        select(PriceBookRow)
        .where(PriceBookRow.effective_from <= now)
        .order_by(col(PriceBookRow.effective_from).desc())
        .limit(1)
    )
    book = (await session.exec(statement)).first()
    if book is None:
        raise LookupError(f"expected a price book effective by {now.isoformat()}, found none; insert one")
    return book


async def pinned(session: AsyncSession, price_book_id: str) -> dict[str, Decimal]:
    """Prices of the book that a job was submitted under."""
    book = await session.get_one(PriceBookRow, price_book_id)
    return parse(book.prices)
