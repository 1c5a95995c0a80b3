from __future__ import annotations

from typing import Annotated

from fastapi import APIRouter, Query, Request, Response

from finery.types.environments import Environment, EnvironmentCreate, EnvironmentRun, EnvironmentRunCreate
from finery.types.pages import Deleted, Page
from finery_service.auth.caller import TenantMember
from finery_service.auth.idempotency import do_once, once_of
from finery_service.db.engine import transaction
from finery_service.environments import checks, runs, service
from finery_service.http.answers import answer
from finery_service.http.bodies import read_json
from finery_service.http.context import Here
from finery_service.http.openapi import guarded, json_body
from finery_service.http.paging import After, Limit

router = APIRouter(prefix="/v1/environments", tags=["environments"])

_GYM = {"name": "sums", "spec": {"type": "reasoning_gym", "task": "chain_sum", "config": {"max_terms": 3}}}
_CHECK = {"type": "string_check", "operation": "eq", "reference": "{{ item.answer }}"}
_FILE = "file_06fbc0000000000000000000000000000000"
_PROMPTS = {"name": "support", "spec": {"type": "prompts", "file": _FILE, "grader": _CHECK}}
_PYTHON = {
    "type": "python",
    "source": "def grade(sample, item):\n    return float(len(sample['output_text'].split()) == item['words'])\n",
}
_MULTI = {
    "type": "multi",
    "graders": {"exact": _CHECK, "words": _PYTHON},
    "calculate_output": "0.8 * exact + 0.2 * words",
}
_SEVERAL = {"spec": {"type": "prompts", "file": _FILE, "grader": _MULTI}}
_RUN = {"answers": [{"prompt": 0, "output_text": "42"}, {"prompt": 1, "output_text": "I do not know."}]}


@router.post(
    "",
    status_code=201,
    response_model=Environment,
    responses=guarded(400, 409, 413, 415, 422),
    openapi_extra=json_body(EnvironmentCreate, _GYM, prompts_from_a_file=_PROMPTS, several_graders=_SEVERAL),
)
async def create(request: Request, services: Here, member: TenantMember) -> Response:
    """Keep an environment: prompts, and what rewards an answer. It never changes."""
    settings = services.settings
    body = await read_json(request, EnvironmentCreate, settings.max_body_bytes)
    await checks.check(body.value.spec, "spec", settings.score_models)
    once, now = once_of(request, member.tenant_id, body.sha256), services.clock()
    async with transaction(services.app_engine, member.tenant_id) as session:
        return await do_once(session, once, lambda: service.create(session, member, body.value, now), now)


@router.get("", response_model=Page[Environment], responses=guarded(400, 404, noun="project", codes=["invalid_cursor"]))
async def list_(
    services: Here,
    member: TenantMember,
    project: Annotated[str | None, Query(description="Only this project's.")] = None,
    after: After = None,
    limit: Limit = 20,
) -> Response:
    """Your environments, newest first. A page ends before `limit` where they are long: go on while `has_more`."""
    async with transaction(services.app_engine, member.tenant_id) as session:
        page = await service.list_page(session, member.tenant_id, project=project, after=after, limit=limit)
        return answer(page)


@router.get("/{environment_id}", response_model=Environment, responses=guarded(404, noun="environment"))
async def retrieve(environment_id: str, services: Here, member: TenantMember) -> Response:
    """The environment as it was created."""
    async with transaction(services.app_engine, member.tenant_id) as session:
        return answer(await service.get(session, member.tenant_id, environment_id))


@router.delete("/{environment_id}", response_model=Deleted, responses=guarded(404, noun="environment"))
async def delete(environment_id: str, services: Here, member: TenantMember) -> Response:
    """Delete an environment. Jobs that use it go on: they have a copy."""
    async with transaction(services.app_engine, member.tenant_id) as session:
        await service.delete(session, member.tenant_id, environment_id, services.clock())
    return answer(Deleted(object="environment", id=environment_id))


@router.post(
    "/{environment_id}/runs",
    status_code=201,
    response_model=EnvironmentRun,
    responses=guarded(400, 404, 409, 413, 415, 422, 429, noun="environment", codes=["too_many_runs"]),
    openapi_extra=json_body(EnvironmentRunCreate, _RUN, required=False),
)
async def run(environment_id: str, request: Request, services: Here, member: TenantMember) -> Response:
    """Grade answers of your own before a job is started, and look at prompts.

    The answer is `pending`; look again until it is `ready` or `failed`. It costs nothing and is gone after a day.
    """
    body = await read_json(request, EnvironmentRunCreate, services.settings.max_body_bytes)
    once, now = once_of(request, member.tenant_id, body.sha256), services.clock()
    async with transaction(services.app_engine, member.tenant_id) as session:
        return await do_once(session, once, lambda: runs.create(session, member, environment_id, body.value, now), now)


@router.get("/{environment_id}/runs/{run_id}", response_model=EnvironmentRun, responses=guarded(404, noun="run"))
async def retrieve_run(environment_id: str, run_id: str, services: Here, member: TenantMember) -> Response:
    """The run: rewards and prompts once it is `ready`, its error if it has `failed`."""
    async with transaction(services.app_engine, member.tenant_id) as session:
        return answer(await runs.get(session, member.tenant_id, environment_id, run_id))
