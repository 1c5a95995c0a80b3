"""What GET /v1/usage reads: of the table that grows with every step of everybody, the part that is asked for."""

from __future__ import annotations

from datetime import UTC, datetime

import psycopg
import pytest
from sqlalchemy.ext.asyncio import AsyncEngine

from finery_service.db.engine import transaction
from finery_service.usage import store
from finery_testing import factories
from finery_testing.clock import FakeClock
from finery_testing.postgres import Database

_RECORDS = """
    insert into usage_records (tenant_id, project_id, job_id, attempt_id, sku, unit, step, quantity, state, created_at)
    select tenant_id, %(project)s, job_id, id, 'train.sft', 'step:' || number, number, 1, 'billable',
           timestamptz '2026-01-01Z' + make_interval(days => fence::int, secs => number)
    from attempts, generate_series(1, 500) as number
"""
_READ = "select coalesce(seq_tup_read, 0) + coalesce(idx_tup_fetch, 0) from pg_stat_xact_user_tables where relname = %s"


@pytest.mark.parametrize("one_job", [False, True])
async def test_usage_of_a_day_reads_the_records_of_its_jobs_alone(
    database: Database, system_engine: AsyncEngine, clock: FakeClock, one_job: bool
) -> None:
    tenant = await factories.tenant(system_engine, now=clock())
    file = await factories.file(system_engine, tenant, now=clock())
    jobs = []
    for number in range(40):
        job = await factories.job(system_engine, tenant, now=clock(), state="succeeded", training_file=file)
        jobs.append(job.id)
        ended = {"state": "ended", "reason": "completed", "ended_at": clock()}
        await factories.attempt(system_engine, job, now=clock(), fence=number, **ended)
    with psycopg.connect(database.admin_dsn, autocommit=True) as connection:
        connection.execute(_RECORDS, {"project": tenant.project_id})
        connection.execute("analyze")
    start = None if one_job else datetime(2026, 2, 9, tzinfo=UTC)
    async with transaction(system_engine) as session:
        raw = await session.connection()
        only = jobs[-1] if one_job else None
        found = await store.buckets(session, tenant.id, job_id=only, start=start, end=None)
        read = (await raw.exec_driver_sql(_READ, ("usage_records",))).scalar_one()
    assert [(bucket.job, bucket.billable) for bucket in found] == [(jobs[-1], 500)]
    assert read <= 4 * 500, f"{read} of 20000 records"
