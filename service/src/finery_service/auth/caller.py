"""Who calls: one `Authorization: Bearer` header with a key, looked up by its sha256."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Annotated

from fastapi import Depends, Request

from finery_service.auth import store
from finery_service.auth.secrets import digest, well_formed
from finery_service.db.engine import transaction
from finery_service.errors import ServiceError
from finery_service.http.context import Here


@dataclass(frozen=True)
class Member:
    """A tenant's key."""

    key_id: str
    tenant_id: str
    project_id: str
    """Where its files and jobs go unless a request names another project."""


@dataclass(frozen=True)
class Operator:
    key_id: str


async def caller(request: Request, services: Here) -> Member | Operator:
    """Whoever holds the key. Raises 401, with one and the same body whatever is wrong with it."""
    secret = _secret(request)
    if secret is None:
        raise _unauthenticated()
    async with transaction(services.app_engine) as session:
        holder = await store.holder_of(session, digest(secret))
    if holder is None:
        raise _unauthenticated()
    if holder.role == "operator":
        return Operator(holder.key_id)
    assert holder.tenant_id is not None
    assert holder.project_id is not None
    return Member(holder.key_id, holder.tenant_id, holder.project_id)


AnyCaller = Annotated[Member | Operator, Depends(caller)]


async def member(holder: AnyCaller) -> Member:
    if isinstance(holder, Operator):
        message = "Expected a tenant's key (fny_…), found an operator's; make one at POST /v1/tenants/{id}/keys."
        raise ServiceError(403, "tenant_key_required", message)
    return holder


async def operator(holder: AnyCaller) -> Operator:
    if isinstance(holder, Member):
        message = "Expected an operator's key (fop_…), found a tenant's; ask whoever runs this service."
        raise ServiceError(403, "operator_key_required", message)
    return holder


TenantMember = Annotated[Member, Depends(member)]
OperatorOnly = Annotated[Operator, Depends(operator)]


def _secret(request: Request) -> bytes | None:
    # Bytes as sent: a header may hold any of them, and text would have to guess an encoding.
    values = [value for name, value in request.scope["headers"] if name == b"authorization"]
    if len(values) != 1:
        return None
    scheme, _, secret = values[0].partition(b" ")
    secret = secret.strip(b" ")
    return secret if scheme.lower() == b"bearer" and well_formed(secret) else None


def _unauthenticated() -> ServiceError:
    message = (
        "Expected one header `Authorization: Bearer <key>` with a valid API key, found none or one that is malformed, "
        "unknown or revoked; check the key."
    )
    return ServiceError(401, "invalid_api_key", message, headers={"www-authenticate": "Bearer"})
