from __future__ import annotations

from datetime import datetime
from typing import Any

from sqlalchemy import BigInteger
from sqlmodel import Field, SQLModel

from finery_service.db.columns import json_field, time_field


class JobRow(SQLModel, table=True):
    __tablename__ = "jobs"

    tenant_id: str = Field(primary_key=True)
    id: str = Field(primary_key=True)
    project_id: str
    kind: str = "job"
    """`job`, or what ends with its preparation: `preview` of a file, `run` of an environment."""
    method: str
    model_id: str | None = None
    """None only of a run."""
    base: list[dict[str, Any]] = json_field(default_factory=list)
    from_checkpoint_id: str | None = None
    training_file_id: str | None = None
    """None where an environment makes its prompts."""
    validation_file_id: str | None = None
    environment_id: str | None = None
    environment: dict[str, Any] | None = json_field(default=None)
    """As it is used: `finery.types.environments.EnvironmentSpec`."""
    price_book_id: str
    name: str | None = None
    spec: dict[str, Any] = json_field()
    customer_metadata: dict[str, Any] | None = json_field(default=None)
    priority: str
    accelerators: int
    accelerator_type: str | None = None
    state: str
    intent: str = "run"
    intent_at: datetime | None = time_field(default=None)
    reason: str | None = None
    error: dict[str, Any] | None = json_field(default=None)
    queue_position: int | None = None
    version: int = Field(default=1, sa_type=BigInteger)
    fence: int = Field(default=0, sa_type=BigInteger)
    faults: dict[str, int] = json_field(default_factory=dict)
    step: int = Field(default=0, sa_type=BigInteger)
    reported_step: int = Field(default=-1, sa_type=BigInteger)
    total_steps: int | None = Field(default=None, sa_type=BigInteger)
    stopped_step: int | None = Field(default=None, sa_type=BigInteger)
    prepared_prefix: str | None = None
    data: dict[str, Any] | None = json_field(default=None)
    preview: dict[str, Any] | None = json_field(default=None)
    run: dict[str, Any] | None = json_field(default=None)
    quote_tokens: int | None = Field(default=None, sa_type=BigInteger)
    usage: dict[str, int] = json_field(default_factory=dict)
    last_checkpoint_id: str | None = None
    created_at: datetime = time_field()
    queued_at: datetime | None = time_field(default=None)
    started_at: datetime | None = time_field(default=None)
    finished_at: datetime | None = time_field(default=None)
    not_before: datetime | None = time_field(default=None)


class JobHeadRow(SQLModel, table=True):
    __tablename__ = "job_heads"

    tenant_id: str
    job_id: str = Field(primary_key=True)
    seq: int = Field(default=0, sa_type=BigInteger)


class EventRow(SQLModel, table=True):
    __tablename__ = "events"

    tenant_id: str
    job_id: str = Field(primary_key=True)
    seq: int = Field(primary_key=True, sa_type=BigInteger)
    type: str
    data: dict[str, Any] = json_field()
    created_at: datetime = time_field()


class AttemptRow(SQLModel, table=True):
    __tablename__ = "attempts"

    tenant_id: str = Field(primary_key=True)
    id: str = Field(primary_key=True)
    job_id: str
    kind: str
    fence: int = Field(sa_type=BigInteger)
    state: str
    placements: list[dict[str, Any]] = json_field(default_factory=list)
    launched_at: datetime | None = time_field(default=None)
    lease_expires_at: datetime = time_field()
    resumed_from_step: int = Field(default=0, sa_type=BigInteger)
    granted_through: int = Field(default=0, sa_type=BigInteger)
    step: int = Field(default=0, sa_type=BigInteger)
    reason: str | None = None
    code_version: str | None = None
    cleaned_at: datetime | None = time_field(default=None)
    created_at: datetime = time_field()
    ended_at: datetime | None = time_field(default=None)
