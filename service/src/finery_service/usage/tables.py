from __future__ import annotations

from datetime import datetime
from typing import Any

from sqlalchemy import BigInteger, Identity
from sqlmodel import Field, SQLModel

from finery_service.db.columns import json_field, time_field


class PriceBookRow(SQLModel, table=True):
    __tablename__ = "price_books"

    id: str = Field(primary_key=True)
    effective_from: datetime = time_field()
    prices: dict[str, Any] = json_field()


class UsageRecordRow(SQLModel, table=True):
    __tablename__ = "usage_records"

    id: int | None = Field(default=None, primary_key=True, sa_type=BigInteger, sa_column_args=(Identity(always=True),))
    tenant_id: str
    project_id: str
    job_id: str
    attempt_id: str
    sku: str
    unit: str
    step: int = Field(sa_type=BigInteger)
    quantity: int = Field(sa_type=BigInteger)
    state: str
    void_reason: str | None = None
    created_at: datetime = time_field()
