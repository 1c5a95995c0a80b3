"""What a page of rollouts reads: of a job's many steps, those that are on it."""

from __future__ import annotations

import psycopg
from sqlalchemy.ext.asyncio import AsyncEngine

from finery_service.db.engine import transaction
from finery_service.rollouts import store
from finery_testing import factories
from finery_testing.clock import FakeClock
from finery_testing.postgres import Database

_FILES = """
    insert into rollout_files (tenant_id, job_id, kind, step, attempt_id, object_key, sha256, bytes, count, created_at)
    select tenant_id, job_id, kinds.kind, steps.step, id, 'k', repeat('0', 64), 1, 1, now()
    from attempts, generate_series(1, 5000) as steps(step), unnest(array['train', 'eval']) as kinds(kind)
"""
_READ = "select coalesce(seq_tup_read, 0) + coalesce(idx_tup_fetch, 0) from pg_stat_xact_user_tables where relname = %s"


async def test_a_page_reads_its_own_files_alone(
    database: Database, system_engine: AsyncEngine, clock: FakeClock
) -> None:
    tenant = await factories.tenant(system_engine, now=clock())
    job = await factories.job(system_engine, tenant, now=clock(), method="rl", state="running", fence=1)
    await factories.attempt(system_engine, job, now=clock())
    with psycopg.connect(database.admin_dsn, autocommit=True) as connection:
        connection.execute(_FILES)
        connection.execute("analyze")
    for start in (None, store.place(2500, "eval", 0)):
        async with transaction(system_engine) as session:
            raw = await session.connection()
            found = await store.files(session, tenant.id, job.id, step=None, kind=None, start=start, limit=22)
            read = (await raw.exec_driver_sql(_READ, ("rollout_files",))).scalar_one()
        first = (1, "train") if start is None else (2500, "eval")
        assert (len(found), found[0].step, found[0].kind) == (22, *first)
        assert read <= 50, f"{read} of 10000 files"
