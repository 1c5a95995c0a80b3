"""Bring a database to the newest schema: alembic, as `finery_owner`, one transaction, one migrator at a time."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from alembic import command
from alembic.config import Config
from sqlalchemy import Connection, NullPool, String, create_engine
from sqlalchemy.types import TypeEngine
from sqlmodel.sql.sqltypes import AutoString

import finery_service

_LOCK = 0x46494E45  # any number that nobody else uses as an advisory lock in this database


def migrations_folder() -> Path:
    """`finery_service/migrations` in a wheel, `service/migrations` of the checkout in an editable install."""
    package = Path(finery_service.__file__).parent
    for folder in (package / "migrations", package.parents[1] / "migrations"):
        if (folder / "env.py").exists():
            return folder
    raise FileNotFoundError(f"No migrations next to {package}: expected them in the installed package")


def configuration(connection: Connection | None = None) -> Config:
    config = Config()
    config.set_main_option("script_location", str(migrations_folder()).replace("%", "%%"))
    config.attributes["connection"] = connection
    return config


def differs(_context: Any, _column: Any, _ours: Any, found: TypeEngine[Any], expected: TypeEngine[Any]) -> bool | None:
    """For alembic's comparison of types: the schema says `text` where SQLModel says `varchar`, which is the same."""
    return False if isinstance(found, String) and isinstance(expected, AutoString | String) else None


def upgrade(owner_dsn: str, revision: str = "head") -> None:
    """Run every missing migration. Concurrent callers wait for each other; a failing migration changes nothing."""
    url = owner_dsn.replace("postgresql://", "postgresql+psycopg://", 1)
    engine = create_engine(url, poolclass=NullPool)
    with engine.begin() as connection:
        connection.exec_driver_sql("select pg_advisory_xact_lock(%s)", (_LOCK,))
        command.upgrade(configuration(connection), revision)
