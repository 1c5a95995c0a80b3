"""Alembic's entry: `finery_service.db.migrate` passes a connection; the `alembic` command reads FINERY_OWNER_DSN."""

from __future__ import annotations

from alembic import context
from sqlalchemy import Connection, NullPool, create_engine

from finery_service.db.migrate import differs
from finery_service.db.tables import metadata
from finery_service.settings import Settings, required


def run(connection: Connection) -> None:
    context.configure(connection=connection, target_metadata=metadata, compare_type=differs)
    with context.begin_transaction():
        context.run_migrations()


given: Connection | None = context.config.attributes.get("connection")
if given is not None:
    run(given)
else:
    owner_dsn = required(Settings().owner_dsn, "FINERY_OWNER_DSN")
    engine = create_engine(owner_dsn.replace("postgresql://", "postgresql+psycopg://", 1), poolclass=NullPool)
    with engine.begin() as own:
        run(own)
