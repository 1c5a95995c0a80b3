from __future__ import annotations

from datetime import datetime
from typing import Any

from sqlalchemy import BigInteger
from sqlmodel import Field, SQLModel

from finery_service.db.columns import json_field, time_field


class FileRow(SQLModel, table=True):
    __tablename__ = "files"

    tenant_id: str = Field(primary_key=True)
    id: str = Field(primary_key=True)
    project_id: str
    name: str
    bytes: int = Field(sa_type=BigInteger)
    sha256: str
    object_key: str
    status: str
    format: str | None = None
    encoding: str = "jsonl"
    rows: int = Field(sa_type=BigInteger)
    errors: list[dict[str, Any]] = json_field(default_factory=list)
    error_count: int = Field(default=0, sa_type=BigInteger)
    created_at: datetime = time_field()
    deleted_at: datetime | None = time_field(default=None)
    purged_at: datetime | None = time_field(default=None)
