"""A reconciler whose passes a test takes one by one, and the jobs that it meets."""

from __future__ import annotations

from pydantic import SecretStr
from sqlalchemy.ext.asyncio import AsyncEngine

from finery.types.jobs import Intent
from finery_service.db.engine import transaction
from finery_service.jobs import store
from finery_service.jobs.tables import JobRow
from finery_service.reconcile import audit, lease
from finery_service.reconcile.context import Context
from finery_service.settings import Settings
from finery_testing import control, factories
from finery_testing.clock import FakeClock
from finery_testing.pool import ScriptedPool

SETTINGS = Settings(
    worker_secret=SecretStr(control.SECRET),
    store_url="file:///objects",
    rpc_address="127.0.0.1:9",
    reconcile_seconds=0.02,
    leader_seconds=30,
)


async def lead(engine: AsyncEngine, pool: ScriptedPool, clock: FakeClock, holder: str = "one") -> Context:
    leadership = await lease.acquire(engine, holder, 30)
    assert leadership is not None
    context = Context(engine, pool, SETTINGS, clock, leadership)
    context.patience.monotonic = lambda: clock().timestamp()
    return context


async def a_job(engine: AsyncEngine, clock: FakeClock, **values: object) -> JobRow:
    """Later than the ones before it."""
    clock.advance(1)
    tenant = await factories.tenant(engine, now=clock())
    return await factories.job(engine, tenant, now=clock(), **values)  # type: ignore[arg-type]


async def intend(engine: AsyncEngine, job: str, intent: Intent) -> None:
    async with transaction(engine) as session:
        await store.set_intent(session, job, intent)


async def audited(engine: AsyncEngine, pool: ScriptedPool) -> list[str]:
    async with transaction(engine) as session:
        return await audit.differences(session, pool.nodes_)


async def due_again(engine: AsyncEngine) -> None:
    """Lets back-off pass."""
    await control.execute(engine, "update jobs set not_before = null where state <> 'failed'")
