from __future__ import annotations

from sqlmodel import select
from sqlmodel.ext.asyncio.session import AsyncSession

from finery_service.keys.tables import ApiKeyRow


async def lock(session: AsyncSession, tenant_id: str, key_id: str) -> ApiKeyRow | None:
    """The key's row, locked until the transaction ends."""
    statement = select(ApiKeyRow).where(ApiKeyRow.tenant_id == tenant_id, ApiKeyRow.id == key_id).with_for_update()
    return (await session.exec(statement)).one_or_none()
