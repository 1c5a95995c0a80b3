from __future__ import annotations

from datetime import datetime
from typing import Any

from sqlalchemy import BigInteger
from sqlmodel import Field, SQLModel

from finery_service.db.columns import json_field, time_field


class ModelRow(SQLModel, table=True):
    __tablename__ = "models"

    id: str = Field(primary_key=True)
    name: str
    source: dict[str, Any] = json_field()
    max_length: int
    parameters: int | None = Field(default=None, sa_type=BigInteger)
    created_at: datetime = time_field()
