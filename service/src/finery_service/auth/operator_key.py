"""The first key of an installation: made with the database's credentials, not through the API."""

from __future__ import annotations

from datetime import datetime

from finery.types.ids import new_id
from finery_service.auth import secrets
from finery_service.clock import milliseconds
from finery_service.db.engine import create_engine, transaction
from finery_service.keys.tables import OperatorKeyRow


async def create(system_dsn: str, name: str, now: datetime) -> str:
    """Store the hash of a fresh operator key and return the key, which nothing can show again."""
    secret = secrets.new_secret("fop")
    row = OperatorKeyRow(
        id=new_id("key", milliseconds(now)),
        name=name,
        prefix=secrets.shown_prefix(secret),
        hash=secrets.digest(secret),
        created_at=now,
    )
    engine = create_engine(system_dsn, pool_size=1)
    try:
        async with transaction(engine) as session:
            session.add(row)
    finally:
        await engine.dispose()
    return secret
