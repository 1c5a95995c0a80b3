from __future__ import annotations

from sqlmodel import select
from sqlmodel.ext.asyncio.session import AsyncSession

from finery_service.files.tables import FileRow


async def get(session: AsyncSession, tenant_id: str, file_id: str) -> FileRow | None:
    statement = select(FileRow).where(FileRow.tenant_id == tenant_id, FileRow.id == file_id)
    return (await session.exec(statement)).one_or_none()
