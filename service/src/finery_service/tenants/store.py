from __future__ import annotations

from sqlalchemy import text
from sqlmodel import col, select
from sqlmodel.ext.asyncio.session import AsyncSession

from finery_service.tenants.tables import ProjectRow, TenantRow


async def insert(session: AsyncSession, tenant: TenantRow, project: ProjectRow) -> None:
    session.add(tenant)
    await session.flush()
    session.add(project)
    await session.flush()


async def is_taken(session: AsyncSession, name: str) -> bool:
    """Whether a tenant has the name. Nobody else can take it until the transaction ends."""
    lock = text("select pg_advisory_xact_lock(hashtextextended('tenant name ' || :name, 0))")
    await session.execute(lock, {"name": name})
    return (await session.exec(select(TenantRow.id).where(TenantRow.name == name))).first() is not None


async def get(session: AsyncSession, tenant_id: str) -> TenantRow | None:
    return await session.get(TenantRow, tenant_id)


async def default_projects(session: AsyncSession, tenant_ids: list[str]) -> dict[str, str]:
    """Project ids by tenant id."""
    statement = select(ProjectRow.tenant_id, ProjectRow.id).where(
        col(ProjectRow.tenant_id).in_(tenant_ids), col(ProjectRow.is_default)
    )
    return dict((await session.exec(statement)).all())


async def project_exists(session: AsyncSession, tenant_id: str, project_id: str) -> bool:
    statement = select(ProjectRow.id).where(ProjectRow.tenant_id == tenant_id, ProjectRow.id == project_id)
    return (await session.exec(statement)).first() is not None
