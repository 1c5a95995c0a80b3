"""The migrations are the schema: they run from nothing, once, as the owner, and agree with the classes."""

from __future__ import annotations

import os
import subprocess
import sys
import threading
import zipfile
from pathlib import Path
from typing import Any

import psycopg
import pytest
from alembic.autogenerate import compare_metadata
from alembic.migration import MigrationContext
from alembic.script import ScriptDirectory
from sqlalchemy import Engine, NullPool, create_engine, inspect

from finery_service.db import migrate
from finery_service.db.tables import metadata
from finery_testing.postgres import Database

HEAD = ScriptDirectory.from_config(migrate.configuration()).get_current_head()
NOT_IN_CLASSES = {"add_index", "remove_index", "add_fk", "remove_fk", "add_constraint", "remove_constraint"}
"""Indexes and constraints live in the SQL only."""


def sync_engine(dsn: str) -> Engine:
    return create_engine(dsn.replace("postgresql://", "postgresql+psycopg://", 1), poolclass=NullPool)


def version(database: Database) -> list[tuple[str, ...]]:
    with psycopg.connect(database.admin_dsn) as connection:
        return connection.execute("select version_num from alembic_version").fetchall()


def test_they_run_from_an_empty_database_and_again_change_nothing(empty_database: Database) -> None:
    migrate.upgrade(empty_database.owner_dsn)
    assert version(empty_database) == [(HEAD,)]
    migrate.upgrade(empty_database.owner_dsn)
    assert version(empty_database) == [(HEAD,)]
    with psycopg.connect(empty_database.system_dsn) as connection:
        assert connection.execute("select name from models").fetchall() == [("smollm2-135m-instruct",)]


def differences(database: Database) -> list[Any]:
    with sync_engine(database.owner_dsn).connect() as connection:
        context = MigrationContext.configure(connection, opts={"compare_type": migrate.differs})
        # A change of a column comes as a list of one or more tuples.
        diffs = compare_metadata(context, metadata)
    flat = [part for diff in diffs for part in (diff if isinstance(diff, list) else [diff])]
    return [diff for diff in flat if diff[0] not in NOT_IN_CLASSES]


def test_the_classes_agree_with_the_database(database: Database) -> None:
    assert differences(database) == []


def test_the_classes_have_the_primary_keys_of_the_database(database: Database) -> None:
    inspector = inspect(sync_engine(database.owner_dsn))
    assert len(metadata.tables) >= 15
    for table in metadata.tables.values():
        found = inspector.get_pk_constraint(table.name)["constrained_columns"]
        assert {column.name for column in table.primary_key} == set(found), table.name


def test_two_migrators_at_once_wait_for_each_other(empty_database: Database) -> None:
    failures: list[BaseException] = []

    def run() -> None:
        try:
            migrate.upgrade(empty_database.owner_dsn)
        except BaseException as error:
            failures.append(error)

    threads = [threading.Thread(target=run) for _ in range(3)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(60)
    assert failures == []
    assert version(empty_database) == [(HEAD,)]


def test_only_the_owner_can_migrate(empty_database: Database) -> None:
    for dsn in (empty_database.app_dsn, empty_database.system_dsn):
        with pytest.raises(Exception, match="permission denied"):
            migrate.upgrade(dsn)


def test_a_migration_that_fails_leaves_nothing(empty_database: Database) -> None:
    with psycopg.connect(empty_database.owner_dsn) as connection:
        connection.execute("create table usage_records (in_the_way int)")
    with pytest.raises(Exception, match='"usage_records" already exists'):
        migrate.upgrade(empty_database.owner_dsn)
    with psycopg.connect(empty_database.owner_dsn) as connection:
        rows = connection.execute("select tablename from pg_tables where schemaname = 'public'").fetchall()
    assert rows == [("usage_records",)]


def run_cli(environment: dict[str, str], folder: Path) -> subprocess.CompletedProcess[str]:
    command = [str(Path(sys.executable).parent / "finery-service"), "migrate"]
    base = {name: value for name, value in os.environ.items() if not name.startswith("FINERY_")}
    return subprocess.run(command, env=base | environment, cwd=folder, capture_output=True, text=True, check=False)


def test_the_command_migrates_from_any_folder_and_logs_no_password(empty_database: Database, tmp_path: Path) -> None:
    result = run_cli({"FINERY_OWNER_DSN": empty_database.owner_dsn}, tmp_path)
    assert result.returncode == 0, result.stderr
    assert version(empty_database) == [(HEAD,)]
    password = str(psycopg.conninfo.conninfo_to_dict(empty_database.owner_dsn)["password"])
    assert password not in result.stdout + result.stderr


def test_the_command_says_which_variable_is_missing(tmp_path: Path) -> None:
    result = run_cli({}, tmp_path)
    assert result.returncode == 1
    assert "FINERY_OWNER_DSN is not set" in result.stderr
    assert "Traceback" not in result.stderr


def test_the_wheel_carries_the_migrations(tmp_path: Path) -> None:
    service = Path(__file__).parents[2] / "service"
    build = [sys.executable, "-m", "hatchling", "build", "-t", "wheel", "-d", str(tmp_path)]
    subprocess.run(build, cwd=service, check=True, capture_output=True)
    (wheel,) = tmp_path.glob("*.whl")
    names = zipfile.ZipFile(wheel).namelist()
    assert {
        "finery_service/migrations/env.py",
        "finery_service/migrations/versions/0001_foundation.py",
        "finery_service/migrations/versions/0001_foundation.sql",
    } <= set(names)


@pytest.mark.parametrize(
    "change",
    [
        "alter table jobs alter step type integer",
        "alter table jobs alter project_id drop not null",
        "alter table jobs add extra text",
        "alter table job_heads drop seq",
        "alter table events alter data type json",
        "create table extra (id text primary key)",
    ],
)
def test_a_difference_between_classes_and_database_is_noticed(database: Database, change: str) -> None:
    with psycopg.connect(database.owner_dsn) as connection:
        connection.execute(change)
    assert len(differences(database)) == 1
