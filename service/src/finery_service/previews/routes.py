from __future__ import annotations

from fastapi import APIRouter, Request, Response

from finery.types.previews import Preview, PreviewCreate
from finery_service.auth.caller import TenantMember
from finery_service.auth.idempotency import do_once, once_of
from finery_service.db.engine import transaction
from finery_service.http.answers import answer
from finery_service.http.bodies import read_json
from finery_service.http.context import Here
from finery_service.http.openapi import guarded, json_body
from finery_service.previews import service

router = APIRouter(prefix="/v1/files/{file_id}/previews", tags=["files"])

_EXAMPLE = {"model": "smollm2-135m-instruct", "train_on": "assistant", "rows": 3}


@router.post(
    "",
    status_code=201,
    response_model=Preview,
    responses=guarded(400, 404, 409, 413, 415, 422, 429, noun="file"),
    openapi_extra=json_body(PreviewCreate, _EXAMPLE),
)
async def create(file_id: str, request: Request, services: Here, member: TenantMember) -> Response:
    """Ask how some rows of a file would be trained: their tokens, and which of them carry loss.

    The answer is `pending`; look again until it is `ready` or `failed`. It costs nothing and is gone after a day.
    """
    body = await read_json(request, PreviewCreate, services.settings.max_body_bytes)
    once, now = once_of(request, member.tenant_id, body.sha256), services.clock()
    async with transaction(services.app_engine, member.tenant_id) as session:
        return await do_once(session, once, lambda: service.create(session, member, file_id, body.value, now), now)


@router.get("/{preview_id}", response_model=Preview, responses=guarded(404, noun="preview"))
async def retrieve(file_id: str, preview_id: str, services: Here, member: TenantMember) -> Response:
    """The preview: its rows once it is `ready`, its error if it has `failed`."""
    async with transaction(services.app_engine, member.tenant_id) as session:
        return answer(await service.get(session, member.tenant_id, file_id, preview_id))
