from __future__ import annotations

from datetime import datetime

from sqlmodel import Field, SQLModel

from finery_service.db.columns import time_field


class TenantRow(SQLModel, table=True):
    __tablename__ = "tenants"

    id: str = Field(primary_key=True)
    name: str
    created_at: datetime = time_field()


class ProjectRow(SQLModel, table=True):
    __tablename__ = "projects"

    tenant_id: str = Field(primary_key=True)
    id: str = Field(primary_key=True)
    name: str
    is_default: bool = False
    created_at: datetime = time_field()
