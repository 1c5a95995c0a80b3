from __future__ import annotations

from fastapi import APIRouter, Request, Response

from finery.types.models import Model, ModelCreate
from finery.types.pages import Page
from finery_service.auth.caller import AnyCaller, OperatorOnly
from finery_service.auth.idempotency import OPERATOR_SCOPE, do_once, once_of
from finery_service.db.engine import transaction
from finery_service.http.answers import answer
from finery_service.http.bodies import read_json
from finery_service.http.context import Here
from finery_service.http.openapi import guarded, json_body
from finery_service.http.paging import After, Limit
from finery_service.models import service

router = APIRouter(prefix="/v1/models", tags=["models"])

_EXAMPLE = {"name": "my-llama", "source": {"type": "path", "path": "/models/my-llama"}, "max_length": 8192}


@router.post(
    "",
    status_code=201,
    response_model=Model,
    responses=guarded(400, 409, 413, 415, 422, key="operators"),
    openapi_extra=json_body(ModelCreate, _EXAMPLE),
)
async def create(request: Request, services: Here, _operator: OperatorOnly) -> Response:
    """Register a base model (operators)."""
    body = await read_json(request, ModelCreate, services.settings.max_body_bytes)
    once, now = once_of(request, OPERATOR_SCOPE, body.sha256), services.clock()
    async with transaction(services.system_engine) as session:
        return await do_once(session, once, lambda: service.create(session, body.value, now), now)


@router.get("", response_model=Page[Model], responses=guarded(400, key="anyone's", codes=["invalid_cursor"]))
async def list_(services: Here, _caller: AnyCaller, after: After = None, limit: Limit = 20) -> Response:
    """The catalogue, newest first."""
    async with transaction(services.app_engine) as session:
        return answer(await service.list_page(session, services.clock(), after=after, limit=limit))


@router.get("/{name_or_id}", response_model=Model, responses=guarded(404, noun="model", key="anyone's"))
async def retrieve(name_or_id: str, services: Here, _caller: AnyCaller) -> Response:
    """A base model by name or id, with its prices in force."""
    async with transaction(services.app_engine) as session:
        return answer(await service.get(session, name_or_id, services.clock()))
