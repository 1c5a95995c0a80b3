"""The real API on a real database, called in process: what tests of its doors need."""

from __future__ import annotations

import json
from collections.abc import AsyncIterator, Iterable
from contextlib import asynccontextmanager
from dataclasses import dataclass
from datetime import datetime
from pathlib import Path
from typing import Any

import httpx
from fastapi import FastAPI
from obstore.store import LocalStore
from sqlalchemy.ext.asyncio import AsyncEngine

from finery.types.ids import new_id
from finery_service.app import create_app
from finery_service.auth.secrets import digest, new_secret, shown_prefix
from finery_service.clock import milliseconds
from finery_service.db.tables import CheckpointRow, JobRow, OperatorKeyRow
from finery_service.settings import Settings
from finery_testing import factories
from finery_testing.clock import FakeClock

CHAT_ROW = {"messages": [{"role": "user", "content": "hi"}, {"role": "assistant", "content": "ok"}]}


def jsonl(*rows: Any) -> bytes:
    return "".join(json.dumps(row) + "\n" for row in rows).encode()


async def checkpoint(engine: AsyncEngine, job: JobRow, *, now: datetime, step: int = 1, **values: Any) -> CheckpointRow:
    """A published checkpoint of an attempt that has ended; `values` override columns."""
    attempt = await factories.attempt(engine, job, now=now, fence=step, state="ended", ended_at=now, reason="completed")
    defaults: dict[str, Any] = {
        "tenant_id": job.tenant_id,
        "id": new_id("ckpt", milliseconds(now)),
        "job_id": job.id,
        "project_id": job.project_id,
        "attempt_id": attempt.id,
        "step": step,
        "final": False,
        "prefix": f"{job.tenant_id}/jobs/{job.id}/{attempt.id}/checkpoints/step-{step:08d}/",
        "files": [],
        "bytes": 0,
        "manifest": {},
        "resume_prefix": f"{job.tenant_id}/jobs/{job.id}/{attempt.id}/resume/step-{step:08d}/",
        "resume_sha256": "0" * 64,
        "created_at": now,
    }
    row = CheckpointRow(**{**defaults, **values})
    await factories.insert(engine, row)
    return row


@dataclass
class Door:
    """A client with one key."""

    client: httpx.AsyncClient
    tenant: factories.Tenant

    async def get(self, path: str, **arguments: Any) -> httpx.Response:
        return await self.client.get(path, **arguments)

    async def post(self, path: str, body: Any = None, **arguments: Any) -> httpx.Response:
        return await self.client.post(path, json=body, **arguments)

    async def upload(
        self, content: bytes | Iterable[Any], name: str = "chat.jsonl", **arguments: Any
    ) -> httpx.Response:
        data = content if isinstance(content, bytes) else jsonl(*content)
        return await self.client.post("/v1/files", files={"file": (name, data)}, **arguments)

    async def file_id(self, rows: int = 3) -> str:
        answer = await self.upload([CHAT_ROW] * rows)
        assert answer.status_code == 201, answer.text
        return str(answer.json()["id"])

    async def job(self, *, headers: dict[str, str] | None = None, **fields: Any) -> httpx.Response:
        """Create a job; the file (of chat rows) is made unless one is named, or the method has none."""
        if fields.get("method") != "rl":
            fields["training_file"] = fields.get("training_file") or await self.file_id()
        if "from_checkpoint" not in fields:
            fields.setdefault("model", factories.MODEL_NAME)
        return await self.client.post("/v1/jobs", json={"method": "sft", **fields}, headers=headers)


@dataclass
class Api:
    app: FastAPI
    client: httpx.AsyncClient
    """Without a key."""
    system_engine: AsyncEngine
    store_folder: Path
    clock: FakeClock

    async def tenant(self, name: str = "acme") -> Door:
        tenant = await factories.tenant(self.system_engine, now=self.clock(), name=name)
        secret = await factories.key(self.system_engine, tenant, now=self.clock(), secret=new_secret("fny"))
        return Door(self.with_key(secret), tenant)

    async def operator(self) -> httpx.AsyncClient:
        secret, now = new_secret("fop"), self.clock()
        row = OperatorKeyRow(
            id=new_id("key", milliseconds(now)),
            name="root",
            prefix=shown_prefix(secret),
            hash=digest(secret),
            created_at=now,
        )
        await factories.insert(self.system_engine, row)
        return self.with_key(secret)

    def with_key(self, secret: str) -> httpx.AsyncClient:
        return client_of(self.app, {"authorization": f"Bearer {secret}"})

    def objects(self) -> list[str]:
        """Keys in the object store."""
        return sorted(
            str(path.relative_to(self.store_folder)) for path in self.store_folder.rglob("*") if path.is_file()
        )


def client_of(app: FastAPI, headers: dict[str, str] | None = None) -> httpx.AsyncClient:
    transport = httpx.ASGITransport(app, raise_app_exceptions=False)
    return httpx.AsyncClient(transport=transport, base_url="http://finery.test", headers=headers)


@asynccontextmanager
async def running_api(
    app_engine: AsyncEngine, system_engine: AsyncEngine, folder: Path, clock: FakeClock, **settings: Any
) -> AsyncIterator[Api]:
    """`settings` override the defaults."""
    app = create_app(
        Settings(**settings),
        app_engine=app_engine,
        system_engine=system_engine,
        store=LocalStore(folder, mkdir=True),
        clock=clock,
    )
    async with client_of(app) as client:
        yield Api(app, client, system_engine, folder, clock)
    await app.state.services.feeds.close()
