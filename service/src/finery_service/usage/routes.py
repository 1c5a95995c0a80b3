from __future__ import annotations

from typing import Annotated

from fastapi import APIRouter, Query, Response

from finery.types.pages import Page
from finery.types.usage import GroupBy, UsageRow
from finery_service.auth.caller import TenantMember
from finery_service.db.engine import transaction
from finery_service.http.answers import answer
from finery_service.http.context import Here
from finery_service.http.openapi import guarded
from finery_service.http.times import aware
from finery_service.usage import service

router = APIRouter(prefix="/v1/usage", tags=["usage"])

_EXAMPLE = ["2026-12-01T00:00:00Z"]
Time = Annotated[str | None, Query(description="RFC 3339 with a zone; windows are [start, end).", examples=_EXAMPLE)]


@router.get("", response_model=Page[UsageRow], responses=guarded(400, 404, codes=["invalid_time"]))
async def list_(
    services: Here,
    member: TenantMember,
    job: Annotated[str | None, Query(description="Only this job's.")] = None,
    start: Time = None,
    end: Time = None,
    group_by: Annotated[list[GroupBy], Query(description="May be repeated; without it, one total.")] = [],  # noqa: B006
) -> Response:
    """Metered units and their cost at the price book pinned to each job. Days are UTC. At most 5000 rows: ask for a
    shorter time, or one job, where there are more."""
    first, last = aware("start", start), aware("end", end)
    async with transaction(services.app_engine, member.tenant_id) as session:
        page = await service.usage_page(session, member.tenant_id, job_id=job, start=first, end=last, group_by=group_by)
    return answer(page)
