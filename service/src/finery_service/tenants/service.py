"""Tenants and their default project. Only operators come here, in transactions that see all tenants."""

from __future__ import annotations

from datetime import datetime

from sqlmodel.ext.asyncio.session import AsyncSession

from finery.types.ids import new_id
from finery.types.pages import Page
from finery.types.tenants import Tenant, TenantCreate
from finery_service.clock import milliseconds
from finery_service.errors import ServiceError
from finery_service.http.paging import page_of, to_page
from finery_service.tenants import store
from finery_service.tenants.tables import ProjectRow, TenantRow


async def create(session: AsyncSession, body: TenantCreate, now: datetime) -> Tenant:
    """Raises 409 if a tenant has the name."""
    if await store.is_taken(session, body.name):
        message = f"Expected a name that is free, found {body.name!r} in use; choose another one."
        raise ServiceError(409, "tenant_exists", message, param="name", headers={"x-should-retry": "false"})
    tenant = TenantRow(id=new_id("ten", milliseconds(now)), name=body.name, created_at=now)
    project_id = new_id("proj", milliseconds(now))
    project = ProjectRow(tenant_id=tenant.id, id=project_id, name="default", is_default=True, created_at=now)
    await store.insert(session, tenant, project)
    return _to_tenant(tenant, project.id)


async def list_page(session: AsyncSession, *, after: str | None, limit: int) -> Page[Tenant]:
    rows, has_more = await page_of(session, TenantRow, after=after, limit=limit)
    projects = await store.default_projects(session, [row.id for row in rows])
    return to_page([_to_tenant(row, projects[row.id]) for row in rows], has_more)


def _to_tenant(row: TenantRow, default_project: str) -> Tenant:
    return Tenant(id=row.id, name=row.name, default_project=default_project, created_at=row.created_at)
