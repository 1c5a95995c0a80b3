from __future__ import annotations

from datetime import datetime

from sqlalchemy import BigInteger
from sqlmodel import Field, SQLModel

from finery_service.db.columns import time_field


class RolloutFileRow(SQLModel, table=True):
    """Where the rollouts of one step, or of one evaluation, lie: JSON lines."""

    __tablename__ = "rollout_files"

    tenant_id: str
    job_id: str = Field(primary_key=True)
    kind: str = Field(primary_key=True)
    step: int = Field(primary_key=True, sa_type=BigInteger)
    attempt_id: str
    object_key: str
    sha256: str
    bytes: int = Field(sa_type=BigInteger)
    count: int = Field(sa_type=BigInteger)
    created_at: datetime = time_field()
