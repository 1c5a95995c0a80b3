from __future__ import annotations

from typing import Annotated

from fastapi import APIRouter, Query, Request, Response

from finery.types.checkpoints import Checkpoint
from finery.types.pages import Deleted, Page
from finery_service.auth.caller import TenantMember
from finery_service.checkpoints import service
from finery_service.checkpoints.download import download
from finery_service.checkpoints.purge import purge
from finery_service.db.engine import transaction
from finery_service.http.answers import answer
from finery_service.http.context import Here
from finery_service.http.openapi import guarded
from finery_service.http.paging import After, Limit

router = APIRouter(prefix="/v1/checkpoints", tags=["checkpoints"])

_BYTES = {"content": {"application/octet-stream": {"schema": {"type": "string", "format": "binary"}}}}
_RANGE = {**_BYTES, "description": "The range that was asked for."}
_UNCHANGED = {"description": "The file is the one that `If-None-Match` names; files never change."}


@router.get("", response_model=Page[Checkpoint], responses=guarded(400, 404, codes=["invalid_cursor"]))
async def list_(
    services: Here,
    member: TenantMember,
    job: Annotated[str | None, Query(description="Only this job's.")] = None,
    after: After = None,
    limit: Limit = 20,
) -> Response:
    """Checkpoints, oldest first."""
    async with transaction(services.app_engine, member.tenant_id) as session:
        return answer(await service.list_page(session, member.tenant_id, job_id=job, after=after, limit=limit))


@router.get("/{checkpoint_id}", response_model=Checkpoint, responses=guarded(404, noun="checkpoint"))
async def retrieve(checkpoint_id: str, services: Here, member: TenantMember) -> Response:
    """The checkpoint, with its files, their sizes and digests, and how it was made."""
    async with transaction(services.app_engine, member.tenant_id) as session:
        return answer(await service.get(session, member.tenant_id, checkpoint_id))


@router.delete(
    "/{checkpoint_id}",
    response_model=Deleted,
    responses=guarded(404, 409, noun="checkpoint", codes=["checkpoint_in_use"]),
)
async def delete(checkpoint_id: str, services: Here, member: TenantMember) -> Response:
    """Delete a checkpoint with its files. Refused while a job that has not ended, or another checkpoint, needs it."""
    async with transaction(services.app_engine, member.tenant_id) as session:
        row = await service.delete(session, member.tenant_id, checkpoint_id, services.clock())
    await purge(services.system_engine, services.store, row)
    return answer(Deleted(object="checkpoint", id=row.id))


@router.get(
    "/{checkpoint_id}/files/{path:path}",
    response_class=Response,
    responses={**guarded(404, 416, noun="checkpoint"), 200: _BYTES, 206: _RANGE, 304: _UNCHANGED},
)
async def file(checkpoint_id: str, path: str, request: Request, services: Here, member: TenantMember) -> Response:
    """The bytes of one file. `ETag` is its sha256; `Range` and `If-Range` let a download go on where it broke off."""
    async with transaction(services.app_engine, member.tenant_id) as session:
        key, entry = await service.locate(session, member.tenant_id, checkpoint_id, path)
    try:
        return await download(services.store, key, entry, request)
    except FileNotFoundError:
        async with transaction(services.app_engine, member.tenant_id) as session:
            await service.locate(session, member.tenant_id, checkpoint_id, path)  # 404 if it was deleted meanwhile
        raise
