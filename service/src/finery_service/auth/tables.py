from __future__ import annotations

from datetime import datetime
from typing import Any

from sqlmodel import Field, SQLModel

from finery_service.db.columns import json_field, time_field


class IdempotencyRow(SQLModel, table=True):
    __tablename__ = "idempotency_keys"

    tenant_id: str = Field(primary_key=True)
    key: str = Field(primary_key=True)
    route: str
    body_sha256: str
    status: int
    response: dict[str, Any] = json_field()
    created_at: datetime = time_field()
