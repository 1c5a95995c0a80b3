"""Tenants' keys. The secret leaves the service once, in the answer to its creation."""

from __future__ import annotations

from datetime import datetime

from sqlmodel.ext.asyncio.session import AsyncSession

from finery.types.ids import new_id
from finery.types.pages import Page
from finery.types.tenants import Key, KeyCreate
from finery_service.auth.secrets import digest, new_secret, shown_prefix
from finery_service.clock import milliseconds
from finery_service.errors import ServiceError, not_found
from finery_service.http.paging import is_id, page_of, to_page
from finery_service.keys import store
from finery_service.keys.tables import ApiKeyRow
from finery_service.tenants import store as tenants


async def create(session: AsyncSession, tenant_id: str, body: KeyCreate, now: datetime) -> Key:
    """Raises 404 for an unknown tenant, 400 for a project that is not the tenant's."""
    await _check_tenant(session, tenant_id)
    project_id = body.project or (await tenants.default_projects(session, [tenant_id]))[tenant_id]
    if not await tenants.project_exists(session, tenant_id, project_id):
        message = f"Expected a project of the tenant, found {project_id!r}; leave it out for the default one."
        raise ServiceError(400, "project_not_found", message, param="project")
    secret = new_secret("fny")
    row = ApiKeyRow(
        tenant_id=tenant_id,
        id=new_id("key", milliseconds(now)),
        project_id=project_id,
        name=body.name,
        prefix=shown_prefix(secret),
        hash=digest(secret),
        created_at=now,
    )
    session.add(row)
    await session.flush()
    return _to_key(row, secret)


async def list_page(session: AsyncSession, tenant_id: str, *, after: str | None, limit: int) -> Page[Key]:
    await _check_tenant(session, tenant_id)
    mine = ApiKeyRow.tenant_id == tenant_id
    rows, has_more = await page_of(session, ApiKeyRow, mine, after=after, limit=limit)
    return to_page([_to_key(row) for row in rows], has_more)


async def revoke(session: AsyncSession, tenant_id: str, key_id: str, now: datetime) -> Key:
    """The key stops working at once; revoking it again changes nothing."""
    row = await store.lock(session, tenant_id, key_id) if is_id(tenant_id) and is_id(key_id) else None
    if row is None:
        raise not_found("key", key_id)
    row.revoked_at = row.revoked_at or now
    await session.flush()
    return _to_key(row)


def without_secret(key: Key) -> Key:
    """What may be stored of the answer to a creation: a replay has no secret to show."""
    return key.model_copy(update={"secret": None})


async def _check_tenant(session: AsyncSession, tenant_id: str) -> None:
    if not is_id(tenant_id) or await tenants.get(session, tenant_id) is None:
        raise not_found("tenant", tenant_id)


def _to_key(row: ApiKeyRow, secret: str | None = None) -> Key:
    return Key(
        id=row.id,
        name=row.name,
        tenant=row.tenant_id,
        project=row.project_id,
        prefix=row.prefix,
        secret=secret,
        created_at=row.created_at,
        revoked_at=row.revoked_at,
    )
