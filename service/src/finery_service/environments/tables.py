from __future__ import annotations

from datetime import datetime
from typing import Any

from sqlmodel import Field, SQLModel

from finery_service.db.columns import json_field, time_field


class EnvironmentRow(SQLModel, table=True):
    __tablename__ = "environments"

    tenant_id: str = Field(primary_key=True)
    id: str = Field(primary_key=True)
    project_id: str
    name: str | None = None
    spec: dict[str, Any] = json_field()
    created_at: datetime = time_field()
    deleted_at: datetime | None = time_field(default=None)
