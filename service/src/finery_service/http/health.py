"""/livez, /readyz, /metrics: for load balancers and Prometheus; no key is asked for."""

from __future__ import annotations

from functools import cache

from alembic.script import ScriptDirectory
from fastapi import APIRouter, Response
from sqlalchemy import text
from sqlalchemy.exc import SQLAlchemyError

from finery.types.base import Resource
from finery.types.jobs import TERMINAL, JobState
from finery_service.db.engine import transaction
from finery_service.db.migrate import configuration
from finery_service.errors import ServiceError
from finery_service.http.answers import answer
from finery_service.http.context import Here, Services
from finery_service.http.openapi import errors

router = APIRouter(tags=["health"])


class Health(Resource):
    status: str = "ok"


@router.get("/livez", response_model=Health)
async def livez() -> Response:
    """The process answers."""
    return answer(Health())


@router.get("/readyz", response_model=Health, responses=errors(503))
async def readyz(services: Here) -> Response:
    """The database answers and has the schema that this code was written for."""
    problem = await _problem(services)
    if problem is not None:
        raise ServiceError(503, "not_ready", problem, headers={"retry-after": "1"})
    return answer(Health())


_OPEN_JOBS = text("""
    select known.state, count(jobs.id), greatest(extract(epoch from now() - min(jobs.queued_at)), 0)
    from unnest(cast(:states as text[])) as known (state)
    left join jobs on jobs.state = known.state and jobs.kind = 'job'
        and jobs.state not in ('succeeded', 'failed', 'cancelled', 'paused')
    group by 1
""").bindparams(states=[state.value for state in JobState if state not in (*TERMINAL, JobState.PAUSED)])
_TEXT = {"content": {"text/plain": {"schema": {"type": "string"}}}}


@router.get("/metrics", response_class=Response, responses={200: _TEXT})
async def metrics(services: Here) -> Response:
    """Requests, uploads, streams, open jobs: Prometheus' text format."""
    await _count_jobs(services)
    return Response(services.metrics.text(), media_type="text/plain; version=0.0.4; charset=utf-8")


async def _count_jobs(services: Services) -> None:
    """Without a database the rest is still told, and of jobs nothing."""
    metrics = services.metrics
    metrics.open_jobs.clear()
    try:
        async with transaction(services.system_engine) as session:
            rows = (await session.execute(_OPEN_JOBS)).all()
    except (SQLAlchemyError, OSError):
        metrics.oldest_queued.set(float("nan"))
        return
    for state, count, _ in rows:
        metrics.open_jobs.labels(state).set(count)
    metrics.oldest_queued.set(next((seconds for state, _, seconds in rows if state == JobState.QUEUED), 0))


async def _problem(services: Services) -> str | None:
    try:
        async with transaction(services.app_engine) as session:
            revision = (await session.execute(text("select version_num from alembic_version"))).scalar_one_or_none()
    except (SQLAlchemyError, OSError):
        return "Expected a database with our schema, found none that answers; see the log of PostgreSQL."
    if revision != _newest_revision():
        return f"Expected the schema {_newest_revision()}, found {revision}; run `finery-service migrate`."
    return None


@cache
def _newest_revision() -> str | None:
    return ScriptDirectory.from_config(configuration()).get_current_head()
