from __future__ import annotations

from typing import Annotated, Any, Literal

from fastapi import APIRouter, Query, Request, Response

from finery.types.jobs import Event, Intent, Job, JobState
from finery.types.methods import JobCreate, JobUpdate, RlJobCreate
from finery.types.pages import Page
from finery_service.auth.caller import Member, TenantMember
from finery_service.auth.idempotency import do_once, once_of
from finery_service.db.engine import transaction
from finery_service.environments import checks
from finery_service.errors import not_found
from finery_service.http.answers import answer
from finery_service.http.bodies import OneOf, read_json
from finery_service.http.context import Here, Services
from finery_service.http.openapi import guarded, json_body
from finery_service.http.paging import After, Limit, is_id
from finery_service.http.times import aware
from finery_service.jobs import queries, service, stream
from finery_service.tenants import store as tenants

router = APIRouter(prefix="/v1/jobs", tags=["jobs"])

_CREATE: OneOf[Any] = OneOf(JobCreate)
_EXAMPLE = {
    "method": "sft",
    "model": "smollm2-135m-instruct",
    "training_file": "file_06fbc0000000000000000000000000000000",
    "hyperparameters": {"epochs": 1, "learning_rate": 2e-4},
}
_CHAINED = {
    "method": "sft",
    "from_checkpoint": "ckpt_06fbc0000000000000000000000000000000",
    "merge_checkpoint": True,
    "training_file": "file_06fbc0000000000000000000000000000000",
    "validation_file": "file_06fbc0000000000000000000000000000001",
    "adapter": {"type": "lora", "rank": 8, "modules_to_save": ["embed_tokens", "lm_head"]},
    "added_tokens": ["<|tool|>"],
    "hyperparameters": {"schedule": "wsd", "decay_ratio": 0.3, "early_stopping_patience": 2},
}
_FULL = {**_EXAMPLE, "adapter": {"type": "full"}, "hyperparameters": {"learning_rate": 1e-5}}
_DPO = {
    "method": "dpo",
    "from_checkpoint": "ckpt_06fbc0000000000000000000000000000000",
    "training_file": "file_06fbc0000000000000000000000000000000",
    "hyperparameters": {"loss": "sigmoid", "beta": 0.1},
}
_RL = {
    "method": "rl",
    "from_checkpoint": "ckpt_06fbc0000000000000000000000000000000",
    "environment": {"type": "reasoning_gym", "task": "chain_sum"},
    "hyperparameters": {"algorithm": "grpo", "steps": 50, "max_new_tokens": 64, "eval_prompts": 20},
}
_GRADED = {
    "method": "rl",
    "model": "smollm2-135m-instruct",
    "environment": {
        "type": "prompts",
        "file": "file_06fbc0000000000000000000000000000000",
        "grader": {"type": "string_check", "operation": "eq", "reference": "{{ item.answer }}"},
    },
    "hyperparameters": {"prompts_per_step": 8, "samples_per_prompt": 8},
}
_UPDATE = {"name": "support-bot", "metadata": {"team": "support"}}
_TIME = ["2026-12-01T00:00:00Z"]

Seq = Annotated[int, Query(ge=0, lt=2**63, description="Only events after this `seq`.")]
States = Annotated[list[JobState], Query(description="Only jobs in this state; may be repeated.")]
Methods = Annotated[list[Literal["sft", "dpo", "rl"]], Query(description="Only jobs of this method; may be repeated.")]
Project = Annotated[str | None, Query(description="Only this project's.")]
CreatedAfter = Annotated[str | None, Query(description="Only jobs created later; RFC 3339.", examples=_TIME)]
CreatedBefore = Annotated[
    str | None, Query(description="Only jobs created earlier; RFC 3339 with a zone.", examples=_TIME)
]


@router.post(
    "",
    status_code=201,
    response_model=Job,
    responses=guarded(400, 409, 413, 415, 422),
    openapi_extra=json_body(
        _CREATE, _EXAMPLE, from_a_checkpoint=_CHAINED, all_weights=_FULL, preferences=_DPO, tasks=_RL, prompts=_GRADED
    ),
)
async def create(request: Request, services: Here, member: TenantMember) -> Response:
    """Submit a job."""
    body = await read_json(request, _CREATE, services.settings.max_body_bytes, root_param="model")
    spec = body.value
    if isinstance(spec, RlJobCreate) and not isinstance(spec.environment, str):
        await checks.check(spec.environment, "environment", services.settings.score_models)
    once, now = once_of(request, member.tenant_id, body.sha256), services.clock()
    async with transaction(services.app_engine, member.tenant_id) as session:
        return await do_once(session, once, lambda: service.submit(session, member, spec, now), now)


@router.get("", response_model=Page[Job], responses=guarded(400, 404, noun="project", codes=["invalid_cursor"]))
async def list_(
    services: Here,
    member: TenantMember,
    state: States = [],  # noqa: B006 - FastAPI copies it
    method: Methods = [],  # noqa: B006
    project: Project = None,
    created_after: CreatedAfter = None,
    created_before: CreatedBefore = None,
    after: After = None,
    limit: Limit = 20,
) -> Response:
    """Your jobs, newest first. A page ends before `limit` where environments are long: go on while `has_more`."""
    first, last = aware("created_after", created_after), aware("created_before", created_before)
    async with transaction(services.app_engine, member.tenant_id) as session:
        if project is not None and not (
            is_id(project) and await tenants.project_exists(session, member.tenant_id, project)
        ):
            raise not_found("project", project, "project")
        filters = queries.filters(
            states=state, methods=method, project=project, created_after=first, created_before=last
        )
        return answer(await service.list_page(session, member.tenant_id, filters, after=after, limit=limit))


@router.get("/{job_id}", response_model=Job, responses=guarded(404))
async def retrieve(job_id: str, services: Here, member: TenantMember) -> Response:
    """The job as it is now: state and why, progress, what was found in its data, usage and cost."""
    async with transaction(services.app_engine, member.tenant_id) as session:
        return answer(await service.get(session, member.tenant_id, job_id))


@router.patch(
    "/{job_id}",
    response_model=Job,
    responses=guarded(400, 404, 413, 415),
    openapi_extra=json_body(JobUpdate, _UPDATE, once=False),
)
async def update(job_id: str, request: Request, services: Here, member: TenantMember) -> Response:
    """Change the name or the metadata of a job, in whatever state it is."""
    body = await read_json(request, JobUpdate, services.settings.max_body_bytes)
    async with transaction(services.app_engine, member.tenant_id) as session:
        return answer(await service.update(session, member.tenant_id, job_id, body.value))


@router.post("/{job_id}/cancel", response_model=Job, responses=guarded(404, 409, codes=["job_already_terminal"]))
async def cancel(job_id: str, services: Here, member: TenantMember) -> Response:
    """Ask for the end of a job. It publishes a checkpoint if it can, then becomes `cancelled`; asking twice is fine."""
    return await _intend(services, member, job_id, Intent.CANCEL)


@router.post("/{job_id}/pause", response_model=Job, responses=guarded(404, 409, codes=["job_already_terminal"]))
async def pause(job_id: str, services: Here, member: TenantMember) -> Response:
    """Let a job rest at its next checkpoint, which it publishes at once; it holds no accelerator and costs nothing.

    A job whose data is being prepared finishes that first. Asking twice is fine. 409 once it is being cancelled.
    """
    return await _intend(services, member, job_id, Intent.PAUSE)


@router.post("/{job_id}/resume", response_model=Job, responses=guarded(404, 409, codes=["job_is_being_cancelled"]))
async def resume(job_id: str, services: Here, member: TenantMember) -> Response:
    """Let a paused job queue again and go on from its last checkpoint. One that is not paused stays as it is."""
    return await _intend(services, member, job_id, Intent.RUN)


@router.get(
    "/{job_id}/events",
    response_model=Page[Event],
    responses={
        **guarded(400, 404, codes=["invalid_cursor"]),
        200: {"content": {stream.MEDIA_TYPE: {"schema": {"type": "string"}}}},
    },
)
async def events(
    job_id: str, request: Request, services: Here, member: TenantMember, after: Seq = 0, limit: Limit = 20
) -> Response:
    """The job's history, oldest first; with `Accept: text/event-stream` live, to the end (`event: done`).

    A stream goes on after `Last-Event-ID`, or after `after`. Each event's `id` is its `seq`. It ends without `done`
    when the server stops, or the key it was opened with is revoked: connect again.
    """
    if stream.wants_stream(request):
        return await stream.open_stream(services, member, job_id, stream.cursor_of(request, after))
    async with transaction(services.app_engine, member.tenant_id) as session:
        return answer(await service.event_page(session, member.tenant_id, job_id, after=after, limit=limit))


async def _intend(services: Services, member: Member, job_id: str, intent: Intent) -> Response:
    async with transaction(services.app_engine, member.tenant_id) as session:
        return answer(await service.intend(session, member.tenant_id, job_id, intent))
