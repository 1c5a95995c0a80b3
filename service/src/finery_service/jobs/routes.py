from __future__ import annotations

from typing import Annotated

from fastapi import APIRouter, Query, Request, Response

from finery.types.jobs import Event, Job
from finery.types.methods import JobCreate
from finery.types.pages import Page
from finery_service.auth.caller import TenantMember
from finery_service.auth.idempotency import do_once, once_of
from finery_service.db.engine import transaction
from finery_service.http.answers import answer
from finery_service.http.bodies import read_json
from finery_service.http.context import Here
from finery_service.http.openapi import guarded, json_body
from finery_service.http.paging import After, Limit
from finery_service.jobs import service, stream

router = APIRouter(prefix="/v1/jobs", tags=["jobs"])

_EXAMPLE = {
    "method": "sft",
    "model": "smollm2-135m-instruct",
    "training_file": "file_06fbc0000000000000000000000000000000",
    "hyperparameters": {"epochs": 1, "learning_rate": 2e-4},
}
Seq = Annotated[int, Query(ge=0, lt=2**63, description="Only events after this `seq`.")]


@router.post(
    "",
    status_code=201,
    response_model=Job,
    responses=guarded(400, 409, 413, 415, 422),
    openapi_extra=json_body(JobCreate, _EXAMPLE),
)
async def create(request: Request, services: Here, member: TenantMember) -> Response:
    """Submit a job."""
    body = await read_json(request, JobCreate, services.settings.max_body_bytes, root_param="model")
    once, now = once_of(request, member.tenant_id, body.sha256), services.clock()
    async with transaction(services.app_engine, member.tenant_id) as session:
        return await do_once(session, once, lambda: service.submit(session, member, body.value, now), now)


@router.get("", response_model=Page[Job], responses=guarded(400))
async def list_(services: Here, member: TenantMember, after: After = None, limit: Limit = 20) -> Response:
    """Your jobs, newest first."""
    async with transaction(services.app_engine, member.tenant_id) as session:
        return answer(await service.list_page(session, member.tenant_id, after=after, limit=limit))


@router.get("/{job_id}", response_model=Job, responses=guarded(404))
async def retrieve(job_id: str, services: Here, member: TenantMember) -> Response:
    async with transaction(services.app_engine, member.tenant_id) as session:
        return answer(await service.get(session, member.tenant_id, job_id))


@router.post("/{job_id}/cancel", response_model=Job, responses=guarded(404, 409))
async def cancel(job_id: str, services: Here, member: TenantMember) -> Response:
    """Ask for the end of a job. It publishes a checkpoint if it can, then becomes `cancelled`; asking twice is fine."""
    async with transaction(services.app_engine, member.tenant_id) as session:
        return answer(await service.cancel(session, member.tenant_id, job_id))


@router.get(
    "/{job_id}/events",
    response_model=Page[Event],
    responses={**guarded(400, 404), 200: {"content": {stream.MEDIA_TYPE: {"schema": {"type": "string"}}}}},
)
async def events(
    job_id: str, request: Request, services: Here, member: TenantMember, after: Seq = 0, limit: Limit = 20
) -> Response:
    """The job's history, oldest first; with `Accept: text/event-stream` live, to the end (`event: done`).

    A stream goes on after `Last-Event-ID`, or after `after`. Each event's `id` is its `seq`.
    """
    if stream.wants_stream(request):
        return await stream.open_stream(services, member.tenant_id, job_id, stream.cursor_of(request, after))
    async with transaction(services.app_engine, member.tenant_id) as session:
        return answer(await service.event_page(session, member.tenant_id, job_id, after=after, limit=limit))
