from __future__ import annotations

from sqlmodel import col, select
from sqlmodel.ext.asyncio.session import AsyncSession

from finery_service.keys.tables import ApiKeyRow


async def lock(session: AsyncSession, tenant_id: str, key_id: str) -> ApiKeyRow | None:
    """The key's row, locked until the transaction ends."""
    statement = select(ApiKeyRow).where(ApiKeyRow.tenant_id == tenant_id, ApiKeyRow.id == key_id).with_for_update()
    return (await session.exec(statement)).one_or_none()


async def is_live(session: AsyncSession, key_id: str) -> bool:
    """Whether the key exists and is not revoked."""
    statement = select(ApiKeyRow.id).where(ApiKeyRow.id == key_id, col(ApiKeyRow.revoked_at).is_(None))
    return (await session.exec(statement)).first() is not None
