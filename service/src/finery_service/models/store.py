from __future__ import annotations

from sqlalchemy import or_
from sqlmodel import col, select
from sqlmodel.ext.asyncio.session import AsyncSession

from finery_service.models.tables import ModelRow


async def find(session: AsyncSession, name_or_id: str) -> ModelRow | None:
    statement = select(ModelRow).where(or_(col(ModelRow.id) == name_or_id, col(ModelRow.name) == name_or_id))
    return (await session.exec(statement)).first()
