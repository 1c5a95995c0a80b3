from __future__ import annotations

from datetime import datetime
from typing import Any

from sqlalchemy import BigInteger
from sqlmodel import Field, SQLModel

from finery_service.db.columns import json_field, time_field


class CheckpointRow(SQLModel, table=True):
    __tablename__ = "checkpoints"

    tenant_id: str = Field(primary_key=True)
    id: str = Field(primary_key=True)
    job_id: str
    project_id: str
    attempt_id: str
    step: int = Field(sa_type=BigInteger)
    final: bool
    kind: str = "adapter"
    validation_loss: float | None = None
    validation_reward: float | None = None
    prefix: str
    files: list[dict[str, Any]] = json_field()
    bytes: int = Field(sa_type=BigInteger)
    manifest: dict[str, Any] = json_field()
    resume_prefix: str
    resume_sha256: str
    created_at: datetime = time_field()
    deleted_at: datetime | None = time_field(default=None)
    purged_at: datetime | None = time_field(default=None)
