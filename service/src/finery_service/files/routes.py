from __future__ import annotations

from typing import Annotated, Any

from fastapi import APIRouter, Query, Request, Response

from finery.types.files import File
from finery.types.pages import Deleted, Page
from finery_service.auth.caller import TenantMember
from finery_service.db.engine import transaction
from finery_service.files import service
from finery_service.files.purge import purge
from finery_service.http.answers import answer
from finery_service.http.context import Here
from finery_service.http.openapi import IDEMPOTENCY_KEY, guarded
from finery_service.http.paging import After, Limit

router = APIRouter(prefix="/v1/files", tags=["files"])

_TEXT = {"type": "string"}
_FORM: dict[str, Any] = {
    "parameters": [IDEMPOTENCY_KEY],
    "requestBody": {
        "required": True,
        "content": {
            "multipart/form-data": {
                "schema": {
                    "type": "object",
                    "required": ["file"],
                    "properties": {
                        "file": {
                            "type": "string",
                            "format": "binary",
                            "description": "JSONL or parquet, with a filename.",
                        },
                        "name": {**_TEXT, "description": "Shown instead of the filename; at most 255 bytes."},
                        "project": {**_TEXT, "description": "Id of the project; the key's own if left out."},
                        "purpose": {**_TEXT, "description": "Taken and not used: for clients that send one."},
                    },
                }
            }
        },
    },
}


@router.post(
    "",
    status_code=201,
    response_model=File,
    responses=guarded(400, 409, 413, 415, 422, codes=["missing_file", "file_too_large"]),
    openapi_extra=_FORM,
)
async def upload(request: Request, services: Here, member: TenantMember) -> Response:
    """Upload a data set. The answer says whether it is `valid`, and what is wrong with which line."""
    return await service.upload(services, member, request)


@router.get("", response_model=Page[File], responses=guarded(400, 404, noun="project", codes=["invalid_cursor"]))
async def list_(
    services: Here,
    member: TenantMember,
    project: Annotated[str | None, Query(description="Only this project's.")] = None,
    after: After = None,
    limit: Limit = 20,
) -> Response:
    """Your files, newest first."""
    async with transaction(services.app_engine, member.tenant_id) as session:
        page = await service.list_page(session, member.tenant_id, project=project, after=after, limit=limit)
        return answer(page)


@router.get("/{file_id}", response_model=File, responses=guarded(404, noun="file"))
async def retrieve(file_id: str, services: Here, member: TenantMember) -> Response:
    """What was uploaded: its size, digest, format, rows, and what is wrong with it."""
    async with transaction(services.app_engine, member.tenant_id) as session:
        return answer(await service.get(session, member.tenant_id, file_id))


@router.delete("/{file_id}", response_model=Deleted, responses=guarded(404, 409, noun="file", codes=["file_in_use"]))
async def delete(file_id: str, services: Here, member: TenantMember) -> Response:
    """Delete a data set for good. Refused while a job or preview that has not ended reads it, or an environment has its
    prompts in it."""
    async with transaction(services.app_engine, member.tenant_id) as session:
        row = await service.delete(session, member.tenant_id, file_id, services.clock())
    await purge(services.system_engine, services.store, row)
    return answer(Deleted(object="file", id=row.id))
