"""Rows for tests, by plain inserts as finery_system. Every argument has a default that satisfies the schema.

tenant = await factories.tenant(system_engine, now=clock())
job = await factories.job(system_engine, tenant, now=clock(), state="running")
"""

from __future__ import annotations

import hashlib
import secrets
from dataclasses import dataclass
from datetime import datetime, timedelta
from typing import Any

from sqlalchemy.ext.asyncio import AsyncEngine
from sqlmodel import SQLModel

from finery.types.environments import ReasoningGymEnvironment
from finery.types.ids import new_id
from finery.types.methods import DpoJobCreate, JobCreate, RlJobCreate, SftJobCreate
from finery_service.auth.secrets import digest, new_secret, shown_prefix
from finery_service.clock import milliseconds
from finery_service.db.engine import transaction
from finery_service.db.tables import (
    ApiKeyRow,
    AttemptRow,
    FileRow,
    JobHeadRow,
    JobRow,
    ProjectRow,
    TenantRow,
)

MODEL_ID, MODEL_NAME = "mdl_smollm2135minstruct", "smollm2-135m-instruct"
"""The model that the first migration seeds."""
PRICE_BOOK_ID = "pb_default"


@dataclass(frozen=True)
class Tenant:
    id: str
    project_id: str
    """Its default project."""


async def insert(engine: AsyncEngine, *rows: SQLModel) -> None:
    """All rows in one transaction, in the order given."""
    async with transaction(engine) as session:
        for row in rows:
            session.add(row)
            await session.flush()


async def tenant(engine: AsyncEngine, *, now: datetime, name: str = "acme") -> Tenant:
    made = Tenant(new_id("ten", milliseconds(now)), new_id("proj", milliseconds(now)))
    await insert(
        engine,
        TenantRow(id=made.id, name=name, created_at=now),
        ProjectRow(tenant_id=made.id, id=made.project_id, name="default", is_default=True, created_at=now),
    )
    return made


async def key(engine: AsyncEngine, tenant: Tenant, *, now: datetime, secret: str | None = None) -> str:
    """A live key of the tenant's default project; returns its secret."""
    secret = secret or new_secret("fny")
    row = ApiKeyRow(
        tenant_id=tenant.id,
        id=new_id("key", milliseconds(now)),
        project_id=tenant.project_id,
        name="default",
        prefix=shown_prefix(secret),
        hash=digest(secret),
        created_at=now,
    )
    await insert(engine, row)
    return secret


async def file(engine: AsyncEngine, tenant: Tenant, *, now: datetime, **values: Any) -> FileRow:
    sha256 = hashlib.sha256(secrets.token_bytes(8)).hexdigest()
    defaults: dict[str, Any] = {
        "tenant_id": tenant.id,
        "id": new_id("file", milliseconds(now)),
        "project_id": tenant.project_id,
        "name": "chat.jsonl",
        "bytes": 100,
        "sha256": sha256,
        "object_key": f"{tenant.id}/files/{sha256}",
        "status": "valid",
        "format": "chat",
        "rows": 2,
        "created_at": now,
    }
    row = FileRow(**{**defaults, **values})
    await insert(engine, row)
    return row


GYM = ReasoningGymEnvironment(type="reasoning_gym", task="chain_sum")
_FORMATS = {"sft": "chat", "dpo": "preference"}


def spec(method: str, training_file: str | None) -> JobCreate:
    """The smallest of its method; RL is in an environment that makes its prompts."""
    if method == "rl":
        return RlJobCreate(method="rl", model=MODEL_NAME, environment=GYM)
    assert training_file is not None
    if method == "dpo":
        return DpoJobCreate(method="dpo", model=MODEL_NAME, training_file=training_file)
    return SftJobCreate(method="sft", model=MODEL_NAME, training_file=training_file)


async def job(
    engine: AsyncEngine,
    tenant: Tenant,
    *,
    now: datetime,
    method: str = "sft",
    training_file: FileRow | None = None,
    hyperparameters: dict[str, Any] | None = None,
    **values: Any,
) -> JobRow:
    """A job row and its head (no event yet); `values` override columns, `hyperparameters` those of the spec. A file is
    made unless one is given, or the method needs none."""
    if training_file is None and method in _FORMATS:
        training_file = await file(engine, tenant, now=now, format=_FORMATS[method])
    file_id = training_file.id if training_file else None
    asked = spec(method, file_id).model_dump(mode="json")
    asked["hyperparameters"].update(hyperparameters or {})
    state = values.get("state", "queued")
    defaults: dict[str, Any] = {
        "tenant_id": tenant.id,
        "id": new_id("job", milliseconds(now)),
        "project_id": tenant.project_id,
        "method": method,
        "model_id": MODEL_ID,
        "training_file_id": file_id,
        "environment": GYM.model_dump(mode="json") if method == "rl" else None,
        "price_book_id": PRICE_BOOK_ID,
        "spec": asked,
        "priority": "normal",
        "accelerators": 1,
        "state": state,
        "created_at": now,
        "queued_at": now if state != "validating" else None,
        "started_at": now if state in ("running", "succeeded") else None,
        "finished_at": now if state in ("succeeded", "failed", "cancelled") else None,
    }
    row = JobRow(**{**defaults, **values})
    await insert(engine, row, JobHeadRow(tenant_id=tenant.id, job_id=row.id))
    return row


async def attempt(engine: AsyncEngine, job: JobRow, *, now: datetime, **values: Any) -> AttemptRow:
    """A live training attempt with a lease of 15 s; `jobs.fence` is not touched: pass the same `fence` to both."""
    defaults: dict[str, Any] = {
        "tenant_id": job.tenant_id,
        "id": new_id("att", milliseconds(now)),
        "job_id": job.id,
        "kind": "train",
        "fence": max(job.fence, 1),
        "state": "running",
        "launched_at": now,
        "lease_expires_at": now + timedelta(seconds=15),
        "created_at": now,
    }
    row = AttemptRow(**{**defaults, **values})
    await insert(engine, row)
    return row
