from __future__ import annotations

import hashlib
from datetime import datetime
from typing import Literal, NamedTuple

from sqlalchemy import text
from sqlmodel import col, delete, select
from sqlmodel.ext.asyncio.session import AsyncSession

from finery_service.auth.tables import IdempotencyRow

Turn = Literal["ours", "twin", "other"]

# `case` runs in order: the twin's lock first, so that whoever holds the key's lock also holds the twin's.
_TURN = text("""
    select case when not pg_try_advisory_xact_lock(:twin) then 'twin'
                when not pg_try_advisory_xact_lock(:key) then 'other'
                else 'ours' end
""")


class Holder(NamedTuple):
    role: str
    key_id: str
    tenant_id: str | None
    project_id: str | None


async def holder_of(session: AsyncSession, digest: bytes) -> Holder | None:
    """Who holds the key with this sha256, if it is not revoked."""
    statement = text("select role, key_id, tenant_id, project_id from authenticate(:digest)")
    row = (await session.execute(statement, {"digest": digest})).one_or_none()
    return Holder._make(row) if row is not None else None


async def take_turn(session: AsyncSession, scope: str, key: str, fingerprint: str) -> Turn:
    """Whether this transaction may answer for the key now, or a twin, or another request under the same key, is
    at it. Held until the transaction ends."""
    arguments = {"twin": _lock_number(scope, key, fingerprint), "key": _lock_number(scope, key)}
    turn: Turn = (await session.execute(_TURN, arguments)).scalar_one()
    return turn


async def answered(session: AsyncSession, scope: str, key: str) -> IdempotencyRow | None:
    statement = select(IdempotencyRow).where(IdempotencyRow.tenant_id == scope, IdempotencyRow.key == key)
    return (await session.exec(statement)).one_or_none()


async def forget(session: AsyncSession, before: datetime) -> None:
    """Deletes what was remembered of requests before that time."""
    await session.execute(delete(IdempotencyRow).where(col(IdempotencyRow.created_at) < before))


def _lock_number(*parts: str) -> int:
    text = "\0".join(parts).encode()
    return int.from_bytes(hashlib.sha256(b"idempotency\0" + text).digest()[:8], "big", signed=True)
