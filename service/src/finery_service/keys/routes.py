from __future__ import annotations

from fastapi import APIRouter, Request, Response

from finery.types.pages import Page
from finery.types.tenants import Key, KeyCreate
from finery_service.auth.caller import OperatorOnly
from finery_service.auth.idempotency import OPERATOR_SCOPE, do_once, once_of
from finery_service.db.engine import transaction
from finery_service.http.answers import answer
from finery_service.http.bodies import read_json
from finery_service.http.context import Here
from finery_service.http.openapi import guarded, json_body
from finery_service.http.paging import After, Limit
from finery_service.keys import service

router = APIRouter(prefix="/v1/tenants/{tenant_id}/keys", tags=["keys (operators)"])


@router.post(
    "",
    status_code=201,
    response_model=Key,
    responses=guarded(400, 404, 409, 413, 415, 422, noun="tenant", key="operators"),
    openapi_extra=json_body(KeyCreate, {"name": "laptop"}, required=False),
)
async def create(tenant_id: str, request: Request, services: Here, _operator: OperatorOnly) -> Response:
    """Make a key. `secret` is in this answer only: a replay under the same Idempotency-Key does not repeat it."""
    body = await read_json(request, KeyCreate, services.settings.max_body_bytes)
    once, now = once_of(request, OPERATOR_SCOPE, body.sha256), services.clock()
    async with transaction(services.system_engine) as session:
        return await do_once(
            session,
            once,
            lambda: service.create(session, tenant_id, body.value, now),
            now,
            remember=service.without_secret,
        )


@router.get(
    "", response_model=Page[Key], responses=guarded(400, 404, noun="tenant", key="operators", codes=["invalid_cursor"])
)
async def list_(
    tenant_id: str, services: Here, _operator: OperatorOnly, after: After = None, limit: Limit = 20
) -> Response:
    """A tenant's keys, newest first, revoked ones too."""
    async with transaction(services.system_engine) as session:
        return answer(await service.list_page(session, tenant_id, after=after, limit=limit))


@router.delete("/{key_id}", response_model=Key, responses=guarded(404, noun="key", key="operators"))
async def revoke(tenant_id: str, key_id: str, services: Here, _operator: OperatorOnly) -> Response:
    """Revoke a key: it stops working with this answer."""
    async with transaction(services.system_engine) as session:
        return answer(await service.revoke(session, tenant_id, key_id, services.clock()))
