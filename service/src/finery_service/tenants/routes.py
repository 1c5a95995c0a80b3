from __future__ import annotations

from fastapi import APIRouter, Request, Response

from finery.types.pages import Page
from finery.types.tenants import Tenant, TenantCreate
from finery_service.auth.caller import OperatorOnly
from finery_service.auth.idempotency import OPERATOR_SCOPE, do_once, once_of
from finery_service.db.engine import transaction
from finery_service.http.answers import answer
from finery_service.http.bodies import read_json
from finery_service.http.context import Here
from finery_service.http.openapi import guarded, json_body
from finery_service.http.paging import After, Limit
from finery_service.tenants import service

router = APIRouter(prefix="/v1/tenants", tags=["tenants (operators)"])


@router.post(
    "",
    status_code=201,
    response_model=Tenant,
    responses=guarded(400, 409, 413, 415, 422, key="operators"),
    openapi_extra=json_body(TenantCreate, {"name": "acme"}),
)
async def create(request: Request, services: Here, _operator: OperatorOnly) -> Response:
    """Make a tenant with its default project."""
    body = await read_json(request, TenantCreate, services.settings.max_body_bytes)
    once, now = once_of(request, OPERATOR_SCOPE, body.sha256), services.clock()
    async with transaction(services.system_engine) as session:
        return await do_once(session, once, lambda: service.create(session, body.value, now), now)


@router.get("", response_model=Page[Tenant], responses=guarded(400, key="operators", codes=["invalid_cursor"]))
async def list_(services: Here, _operator: OperatorOnly, after: After = None, limit: Limit = 20) -> Response:
    """All tenants, newest first."""
    async with transaction(services.system_engine) as session:
        return answer(await service.list_page(session, after=after, limit=limit))
