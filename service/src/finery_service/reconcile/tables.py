from __future__ import annotations

from datetime import datetime

from sqlalchemy import BigInteger
from sqlmodel import Field, SQLModel

from finery_service.db.columns import time_field


class LeaseRow(SQLModel, table=True):
    __tablename__ = "leases"

    name: str = Field(primary_key=True)
    holder: str
    epoch: int = Field(sa_type=BigInteger)
    expires_at: datetime = time_field()
