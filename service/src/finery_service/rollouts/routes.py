from __future__ import annotations

from typing import Annotated

from fastapi import APIRouter, Query, Response

from finery.types.pages import Page
from finery.types.rollouts import Rollout, RolloutKind
from finery_service.auth.caller import TenantMember
from finery_service.db.engine import transaction
from finery_service.http.answers import answer
from finery_service.http.context import Here
from finery_service.http.openapi import guarded
from finery_service.http.paging import Limit
from finery_service.rollouts import service
from finery_service.rollouts.reading import Offsets

router = APIRouter(prefix="/v1/jobs", tags=["jobs"])

_offsets = Offsets()

Step = Annotated[int | None, Query(ge=0, lt=2**63, description="Only those of this step; all steps if left out.")]
Kind = Annotated[RolloutKind | None, Query(description="`train`, or `eval` of evaluations; both if left out.")]
AfterRollout = Annotated[str | None, Query(description="Id of the last rollout of the page before.")]


@router.get("/{job_id}/rollouts", response_model=Page[Rollout], responses=guarded(400, 404, codes=["invalid_cursor"]))
async def list_(
    job_id: str,
    services: Here,
    member: TenantMember,
    step: Step = None,
    kind: Kind = None,
    after: AfterRollout = None,
    limit: Limit = 20,
) -> Response:
    """What an RL job sampled, how it was rewarded and what was trained of it, oldest first; of a step first what it
    trained on, then its evaluation.

    A page ends before `limit` where rollouts are long: go on while `has_more`.
    """
    async with transaction(services.app_engine, member.tenant_id) as session:
        files, first = await service.files(
            session, member.tenant_id, job_id, step=step, kind=kind, after=after, limit=limit
        )
    return answer(await service.read_page(services.store, files, first, limit, _offsets))
