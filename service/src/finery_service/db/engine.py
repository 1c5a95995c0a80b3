"""Engines and sessions. One request is one transaction, committed at the edge; the tenant is set inside it."""

from __future__ import annotations

from collections.abc import AsyncIterator
from contextlib import asynccontextmanager

from sqlalchemy import event
from sqlalchemy.engine import Connection
from sqlalchemy.ext.asyncio import AsyncEngine, create_async_engine
from sqlalchemy.orm import Session, SessionTransaction
from sqlmodel.ext.asyncio.session import AsyncSession

_TENANT = "finery_tenant"


def create_engine(dsn: str, *, pool_size: int = 10, idle_seconds: float = 10.0) -> AsyncEngine:
    """`dsn` as `postgresql://user:password@host:port/database`.

    A process that freezes inside a transaction loses it, and its locks, after `idle_seconds`: one job's row held for
    ever would stop the reconciler, and with it every job.
    """
    url = dsn.replace("postgresql://", "postgresql+psycopg://", 1)
    return create_async_engine(
        url,
        pool_size=pool_size,
        max_overflow=pool_size,
        pool_pre_ping=True,  # a server that was started again costs nobody a request
        hide_parameters=True,  # errors are logged, and parameters are customers' data and hashes of keys
        connect_args={
            "connect_timeout": 10,
            "options": f"-c idle_in_transaction_session_timeout={round(idle_seconds * 1000)}",
        },
    )


@event.listens_for(Session, "after_begin")
def _set_tenant(session: Session, _transaction: SessionTransaction, connection: Connection) -> None:
    # Local to the transaction: a session-level SET would leak to the pool's next user.
    tenant = session.info.get(_TENANT)
    if tenant is not None:
        connection.exec_driver_sql("select set_config('app.tenant', %s, true)", (tenant,))


@asynccontextmanager
async def transaction(engine: AsyncEngine, tenant: str | None = None) -> AsyncIterator[AsyncSession]:
    """One transaction: commits when the block ends, rolls back when it raises.

    As `finery_app` nothing is visible unless `tenant` is given; as `finery_system` leave it out.
    """
    async with AsyncSession(engine, expire_on_commit=False) as session:
        if tenant is not None:
            session.info[_TENANT] = tenant
        async with session.begin():
            yield session
