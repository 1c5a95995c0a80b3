from __future__ import annotations

from datetime import datetime

from sqlmodel import Field, SQLModel

from finery_service.db.columns import time_field


class ApiKeyRow(SQLModel, table=True):
    __tablename__ = "api_keys"

    tenant_id: str = Field(primary_key=True)
    id: str = Field(primary_key=True)
    project_id: str
    name: str
    prefix: str
    hash: bytes
    created_at: datetime = time_field()
    revoked_at: datetime | None = time_field(default=None)


class OperatorKeyRow(SQLModel, table=True):
    __tablename__ = "operator_keys"

    id: str = Field(primary_key=True)
    name: str
    prefix: str
    hash: bytes
    created_at: datetime = time_field()
    revoked_at: datetime | None = time_field(default=None)
