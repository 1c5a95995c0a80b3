"""Fixtures for tests of the control plane, which name it in `pytest_plugins`."""

from __future__ import annotations

from collections.abc import AsyncIterator
from typing import Any, Protocol

import grpc
import pytest
import pytest_asyncio
from sqlalchemy.ext.asyncio import AsyncEngine

from finery_testing import control, factories
from finery_testing.clock import FakeClock
from finery_testing.control import SETTINGS, Worker
from finery_testing.pool import ScriptedPool


@pytest_asyncio.fixture
async def channel(system_engine: AsyncEngine, clock: FakeClock) -> AsyncIterator[grpc.aio.Channel]:
    async with control.rpc(system_engine, SETTINGS, clock) as channel:
        yield channel


@pytest_asyncio.fixture
async def worker(channel: grpc.aio.Channel, system_engine: AsyncEngine, clock: FakeClock) -> Worker:
    """A launched train attempt (fence 1) of a job of 4 steps, before Begin."""
    tenant = await factories.tenant(system_engine, now=clock())
    job = await factories.job(
        system_engine, tenant, now=clock(), state="starting", fence=1, total_steps=4, prepared_prefix="p/"
    )
    return Worker(channel, await factories.attempt(system_engine, job, now=clock(), state="starting"))


class Launched(Protocol):
    async def __call__(self, method: str, kind: str = "train", *, job_kind: str = "job", **values: Any) -> Worker: ...


@pytest.fixture
def launched(channel: grpc.aio.Channel, system_engine: AsyncEngine, clock: FakeClock) -> Launched:
    """Launches an attempt (fence 1) of a job of a method, of 4 steps, before Begin; `values` as of `factories.job`."""

    async def launch(method: str, kind: str = "train", *, job_kind: str = "job", **values: Any) -> Worker:
        tenant = await factories.tenant(system_engine, now=clock())
        given: dict[str, Any] = {
            "state": "validating" if kind == "prepare" else "starting",
            "kind": job_kind,
            "fence": 1,
            "total_steps": 4,
        }
        job = await factories.job(system_engine, tenant, now=clock(), method=method, **{**given, **values})
        attempt = await factories.attempt(system_engine, job, now=clock(), state="starting", kind=kind)
        return Worker(channel, attempt)

    return launch


@pytest_asyncio.fixture
async def preparing(channel: grpc.aio.Channel, system_engine: AsyncEngine, clock: FakeClock) -> Worker:
    """A launched prepare attempt, before Begin."""
    tenant = await factories.tenant(system_engine, now=clock())
    job = await factories.job(system_engine, tenant, now=clock(), state="validating", fence=1)
    return Worker(channel, await factories.attempt(system_engine, job, now=clock(), state="starting", kind="prepare"))


@pytest.fixture
def pool() -> ScriptedPool:
    return ScriptedPool()
