"""Row-level security holds with raw SQL, when the application's own filters are off."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from datetime import UTC, datetime
from typing import Any

import psycopg
import pytest
import pytest_asyncio
from psycopg import sql
from psycopg.errors import ForeignKeyViolation, InsufficientPrivilege
from sqlalchemy import text
from sqlalchemy.exc import DBAPIError

from finery_service.auth.secrets import digest
from finery_service.db.engine import create_engine, transaction
from finery_service.db.tables import (
    CheckpointRow,
    EnvironmentRow,
    EventRow,
    IdempotencyRow,
    JobRow,
    RolloutFileRow,
    UsageRecordRow,
)
from finery_testing import factories
from finery_testing.postgres import Database

GLOBAL = {"models", "price_books", "operator_keys", "leases", "alembic_version"}
"""Tables that belong to no tenant. A table that is not named here must be under row-level security."""
NOW = datetime(2026, 12, 1, tzinfo=UTC)
PATCHED = {"name", "customer_metadata"}
"""Columns of a job that its customer may change at any time."""
FRESH = {"id": "job_new", "state": "validating", "fence": 0, "queued_at": None, "started_at": None}


@dataclass(frozen=True)
class Filled:
    """A database where two tenants have a row in every tenant table."""

    database: Database
    a: factories.Tenant
    b: factories.Tenant
    a_job: JobRow
    b_job: JobRow
    b_secret: str


@pytest_asyncio.fixture(scope="module")
async def filled(module_database: Database) -> Filled:
    engine = create_engine(module_database.system_dsn)
    tenants, jobs, secret = [], [], ""
    for name in ("a", "b"):
        tenant = await factories.tenant(engine, now=NOW, name=name)
        secret = await factories.key(engine, tenant, now=NOW)
        job = await factories.job(engine, tenant, now=NOW, state="running", fence=1)
        attempt = await factories.attempt(engine, job, now=NOW)
        work: dict[str, Any] = {"tenant_id": tenant.id, "job_id": job.id, "created_at": NOW}
        of_attempt = {**work, "project_id": tenant.project_id, "attempt_id": attempt.id, "step": 1}
        files: dict[str, Any] = {
            "files": [],
            "bytes": 0,
            "manifest": {},
            "prefix": "p",
            "resume_prefix": "r",
            "resume_sha256": "0",
        }
        await factories.insert(
            engine,
            EventRow(**work, seq=1, type="state", data={}),
            UsageRecordRow(**of_attempt, sku="train.sft", unit="step:1", quantity=1, state="provisional"),
            CheckpointRow(**of_attempt, id=f"ckpt_{name}", final=False, **files),
            RolloutFileRow(
                **work, attempt_id=attempt.id, kind="eval", step=1, object_key="o", sha256="0" * 64, bytes=1, count=1
            ),
            EnvironmentRow(
                tenant_id=tenant.id, id=f"env_{name}", project_id=tenant.project_id, spec={}, created_at=NOW
            ),
            IdempotencyRow(
                tenant_id=tenant.id, key="k", route="r", body_sha256="0", status=200, response={}, created_at=NOW
            ),
        )
        tenants.append(tenant)
        jobs.append(job)
    await engine.dispose()
    return Filled(module_database, tenants[0], tenants[1], jobs[0], jobs[1], secret)


def tables(dsn: str) -> list[str]:
    """Every table of every schema that is not PostgreSQL's own."""
    with psycopg.connect(dsn) as connection:
        rows = connection.execute(
            "select c.relname from pg_class c join pg_namespace n on n.oid = c.relnamespace "
            "where c.relkind in ('r', 'p') and n.nspname not in ('pg_catalog', 'information_schema') "
            "and n.nspname not like 'pg_toast%%' order by 1"
        )
        return [row[0] for row in rows]


def tenant_tables(dsn: str) -> list[str]:
    return [table for table in tables(dsn) if table not in GLOBAL]


def column(table: str) -> sql.Identifier:
    return sql.Identifier("id" if table == "tenants" else "tenant_id")


@contextmanager
def as_app(filled: Filled, tenant: str | None = None) -> Iterator[psycopg.Connection]:
    """One transaction as finery_app, rolled back at the end."""
    with psycopg.connect(filled.database.app_dsn) as connection:
        if tenant is not None:
            connection.execute("select set_config('app.tenant', %s, true)", (tenant,))
        yield connection
        connection.rollback()


def owners_seen(connection: psycopg.Connection, table: str) -> set[str]:
    statement = sql.SQL("select {} from {}").format(column(table), sql.Identifier(table))
    return {row[0] for row in connection.execute(statement)}


def test_every_table_that_is_not_global_has_forced_row_level_security(filled: Filled) -> None:
    with psycopg.connect(filled.database.admin_dsn) as connection:
        for table in tenant_tables(filled.database.admin_dsn):
            row = connection.execute(
                "select relrowsecurity, relforcerowsecurity from pg_class where oid = %s::regclass", (table,)
            )
            assert row.fetchone() == (True, True), f"{table}: enable and force row level security, or name it GLOBAL"


def test_the_roles_have_no_way_around_it(filled: Filled) -> None:
    for role, dsn in (
        ("finery_app", filled.database.app_dsn),
        ("finery_system", filled.database.system_dsn),
        ("finery_owner", filled.database.owner_dsn),
    ):
        with psycopg.connect(dsn) as connection:
            found = connection.execute(
                "select rolname, rolsuper, rolbypassrls, rolcreaterole, rolcreatedb, rolreplication "
                "from pg_roles where rolname = current_user"
            )
            assert found.fetchone() == (role, False, False, False, False, False)
            memberships = connection.execute(
                "select count(*) from pg_auth_members m join pg_roles r on r.oid = m.member "
                "where r.rolname = current_user"
            ).fetchone()
            assert memberships == (0,), f"{role} can become another role"


def test_both_tenants_have_rows_in_every_tenant_table(filled: Filled) -> None:
    """Otherwise the tests below could not fail."""
    with psycopg.connect(filled.database.system_dsn) as connection:
        for table in tenant_tables(filled.database.admin_dsn):
            assert owners_seen(connection, table) == {filled.a.id, filled.b.id}, table


def test_one_tenant_sees_its_rows_and_none_of_another(filled: Filled) -> None:
    for table in tenant_tables(filled.database.admin_dsn):
        with as_app(filled, filled.a.id) as connection:
            assert owners_seen(connection, table) == {filled.a.id}, table


def test_without_a_tenant_nothing_is_visible(filled: Filled) -> None:
    for table in tenant_tables(filled.database.admin_dsn):
        for tenant in (None, "", "ten_unknown", "%"):
            with as_app(filled, tenant) as connection:
                assert owners_seen(connection, table) == set(), (table, tenant)


def test_no_row_can_be_written_for_another_tenant(filled: Filled) -> None:
    refused_by_policy = set()
    for table in tenant_tables(filled.database.admin_dsn):
        with psycopg.connect(filled.database.system_dsn) as system:
            select = sql.SQL("select to_jsonb(t) from {} t where {} = %s limit 1")
            found = system.execute(select.format(sql.Identifier(table), column(table)), (filled.b.id,)).fetchone()
            assert found is not None
        insert = sql.SQL("insert into {0} {1} select * from jsonb_populate_record(null::{0}, %s)").format(
            sql.Identifier(table), sql.SQL("overriding system value" if table == "usage_records" else "")
        )
        with as_app(filled, filled.a.id) as connection, pytest.raises(InsufficientPrivilege) as caught:
            connection.execute(insert, (json.dumps(found[0]),))
        if "row-level security" in str(caught.value):
            refused_by_policy.add(table)
    # The rest is refused for want of the privilege; these may be written, so the policy is what stands in the way.
    assert {"files", "jobs", "job_heads", "events", "idempotency_keys", "environments"} <= refused_by_policy


def test_rows_of_another_tenant_cannot_be_changed_taken_or_deleted(filled: Filled) -> None:
    with as_app(filled, filled.a.id) as connection:
        update = connection.execute("update jobs set intent = 'cancel' where id = %s", (filled.b_job.id,))
        assert update.rowcount == 0
        update = connection.execute("update jobs set intent = 'cancel'")
        assert update.rowcount == 1, "its own only"
    with as_app(filled, filled.a.id) as connection, pytest.raises(InsufficientPrivilege):
        connection.execute("update jobs set tenant_id = %s", (filled.b.id,))
    for table in tenant_tables(filled.database.admin_dsn):
        with as_app(filled, filled.a.id) as connection, pytest.raises(InsufficientPrivilege):
            connection.execute(sql.SQL("delete from {}").format(sql.Identifier(table)))


def test_the_application_cannot_read_or_forge_what_is_the_operators(filled: Filled) -> None:
    for statement in (
        "select * from operator_keys",
        "select * from leases",
        "insert into models select * from models",
        "update price_books set prices = '{}'",
        "update usage_records set quantity = 0",
        "insert into tenants values ('ten_x', 'x', now())",
        "set role finery_system",
        "alter table jobs disable row level security",
        "create table mine (id int)",
    ):
        with as_app(filled, filled.a.id) as connection, pytest.raises(InsufficientPrivilege):
            connection.execute(statement)


def test_of_a_job_the_application_writes_the_intent_and_no_state_or_sum(filled: Filled) -> None:
    """The reconciler alone moves jobs, the system alone meters: a hole in the API cannot end or discount a job."""
    with psycopg.connect(filled.database.admin_dsn) as connection:
        columns = connection.execute("select column_name from information_schema.columns where table_name = 'jobs'")
        names = {row[0] for row in columns.fetchall()} - PATCHED - {"intent", "intent_at", "version"}
    assert {"state", "usage", "fence", "finished_at", "last_checkpoint_id"} <= names
    for name in sorted(names):
        with as_app(filled, filled.a.id) as connection, pytest.raises(InsufficientPrivilege):
            connection.execute(sql.SQL("update jobs set {0} = {0}").format(sql.Identifier(name)))
    insert = "insert into jobs select * from jsonb_populate_record(null::jobs, %s)"
    values = {**filled.a_job.model_dump(mode="json"), **FRESH}
    for change in ({"state": "succeeded", "finished_at": NOW.isoformat()}, {"fence": 1}, {"usage": {"train.sft": 1}}):
        with as_app(filled, filled.a.id) as connection, pytest.raises(InsufficientPrivilege, match="row-level"):
            connection.execute(insert, (json.dumps({**values, **change}),))
    with as_app(filled, filled.a.id) as connection:
        assert connection.execute(insert, (json.dumps(values),)).rowcount == 1


def test_authenticate_answers_nothing_but_the_match_and_needs_no_tenant(filled: Filled) -> None:
    ask = "select role, tenant_id, project_id from authenticate(%s)"
    with as_app(filled) as connection:
        match = connection.execute(ask, (digest(filled.b_secret),)).fetchall()
        assert match == [("member", filled.b.id, filled.b.project_id)]
        assert connection.execute(ask, (hashlib.sha256(b"another").digest(),)).fetchall() == []
        assert owners_seen(connection, "api_keys") == set()


def test_every_reference_between_tenant_tables_carries_the_tenant(filled: Filled) -> None:
    """Foreign-key checks bypass row-level security: only composite keys keep tenants apart."""
    with psycopg.connect(filled.database.admin_dsn) as connection:
        references = connection.execute("""
            select f.conrelid::regclass::text, f.confrelid::regclass::text,
                   array(select a.attname::text from unnest(f.conkey) with ordinality k(n, i)
                         join pg_attribute a on a.attrelid = f.conrelid and a.attnum = k.n order by i),
                   array(select a.attname::text from unnest(f.confkey) with ordinality k(n, i)
                         join pg_attribute a on a.attrelid = f.confrelid and a.attnum = k.n order by i)
            from pg_constraint f where f.contype = 'f'
        """).fetchall()
    between = [row for row in references if row[1] not in GLOBAL | {"tenants"}]
    assert len(between) >= 15
    for table, target, ours, theirs in between:
        assert (ours[0], theirs[0]) == ("tenant_id", "tenant_id"), f"{table}{ours} references {target}{theirs}"


@pytest.mark.parametrize("role", ["app", "system"])
def test_a_job_cannot_reference_another_tenants_file_or_project(filled: Filled, role: str) -> None:
    for change in ({"training_file_id": filled.b_job.training_file_id}, {"project_id": filled.b.project_id}):
        values = {**filled.a_job.model_dump(mode="json"), **FRESH, **change}
        dsn = filled.database.app_dsn if role == "app" else filled.database.system_dsn
        with psycopg.connect(dsn) as connection:
            connection.execute("select set_config('app.tenant', %s, true)", (filled.a.id,))
            with pytest.raises(ForeignKeyViolation):
                connection.execute(
                    "insert into jobs select * from jsonb_populate_record(null::jobs, %s)", (json.dumps(values),)
                )


async def test_the_tenant_does_not_leak_through_the_pool(filled: Filled) -> None:
    engine = create_engine(filled.database.app_dsn, pool_size=1)

    async def divide_by_zero() -> None:
        async with transaction(engine, filled.a.id) as session:
            await session.execute(text("select 1 / 0"))

    count = text("select count(*), pg_backend_pid() from jobs")
    try:
        async with transaction(engine, filled.a.id) as session:
            seen, backend = (await session.execute(count)).one()
            assert seen == 1
        async with transaction(engine) as session:
            assert tuple((await session.execute(count)).one()) == (0, backend), "the same connection, no tenant"
        with pytest.raises(DBAPIError, match="division by zero"):
            await divide_by_zero()
        async with transaction(engine) as session:
            assert tuple((await session.execute(count)).one()) == (0, backend), "after a rollback too"
    finally:
        await engine.dispose()
