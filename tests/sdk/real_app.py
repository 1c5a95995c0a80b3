"""The real API on a real database, in process, and a client of it."""

from __future__ import annotations

import hashlib
from collections.abc import AsyncIterator
from pathlib import Path

import httpx
import pytest_asyncio
from sqlalchemy.ext.asyncio import AsyncEngine
from sqlmodel import select

from finery import AsyncFinery
from finery.types.ids import new_id
from finery.types.jobs import JobState
from finery.types.reasons import JobReason
from finery_service.auth.secrets import new_secret
from finery_service.db.engine import transaction
from finery_service.db.tables import CheckpointRow, JobRow
from finery_service.jobs import store
from finery_testing import factories
from finery_testing.api import Api, running_api
from finery_testing.clock import FakeClock

FILES = {"adapter_config.json": b'{"r": 16}', "sub/adapter_model.safetensors": bytes(range(256)) * 5000}


@pytest_asyncio.fixture
async def real_api(
    app_engine: AsyncEngine, system_engine: AsyncEngine, clock: FakeClock, tmp_path: Path
) -> AsyncIterator[Api]:
    async with running_api(app_engine, system_engine, tmp_path / "objects", clock, heartbeat_seconds=0.2) as running:
        yield running


@pytest_asyncio.fixture
async def client(real_api: Api) -> AsyncIterator[AsyncFinery]:
    tenant = await factories.tenant(real_api.system_engine, now=real_api.clock())
    secret = await factories.key(real_api.system_engine, tenant, now=real_api.clock(), secret=new_secret("fny"))
    async with client_with(real_api, secret) as client:
        yield client


def client_with(api: Api, secret: str | None) -> AsyncFinery:
    return AsyncFinery(secret, "http://finery.test", transport=httpx.ASGITransport(api.app))


async def end(api: Api, job_id: str, state: JobState, reason: JobReason) -> None:
    """As the reconciler does it; the states in between do not matter here."""
    async with transaction(api.system_engine) as session:
        row = (await session.exec(select(JobRow).where(JobRow.id == job_id))).one()
        row.state = "running"
        session.add(row)
    async with transaction(api.system_engine) as session:
        assert await store.move(session, job_id, to=state, reason=reason, now=api.clock())


async def publish(api: Api, job_id: str) -> str:
    async with transaction(api.system_engine) as session:
        job = (await session.exec(select(JobRow).where(JobRow.id == job_id))).one()
    ended = {"state": "ended", "ended_at": api.clock(), "reason": "completed"}
    attempt = await factories.attempt(api.system_engine, job, now=api.clock(), **ended)
    for path, content in FILES.items():
        target = api.store_folder / job.tenant_id / "x" / path
        target.parent.mkdir(parents=True, exist_ok=True)
        target.write_bytes(content)
    listed = [{"path": p, "bytes": len(b), "sha256": hashlib.sha256(b).hexdigest()} for p, b in FILES.items()]
    row = CheckpointRow(
        tenant_id=job.tenant_id,
        id=new_id("ckpt", 1),
        job_id=job.id,
        project_id=job.project_id,
        attempt_id=attempt.id,
        step=1,
        final=True,
        prefix=f"{job.tenant_id}/x/",
        files=listed,
        bytes=sum(map(len, FILES.values())),
        manifest={},
        resume_prefix="r/",
        resume_sha256="0",
        created_at=api.clock(),
    )
    await factories.insert(api.system_engine, row)
    return row.id
