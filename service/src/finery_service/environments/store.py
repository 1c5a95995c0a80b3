from __future__ import annotations

from sqlalchemy import func
from sqlmodel import col, select
from sqlmodel.ext.asyncio.session import AsyncSession

from finery.types.jobs import JobState
from finery_service.environments.tables import EnvironmentRow
from finery_service.files.store import Lock
from finery_service.jobs.tables import JobRow


async def get(
    session: AsyncSession, tenant_id: str, environment_id: str, *, lock: Lock | None = None
) -> EnvironmentRow | None:
    """None for a deleted one, too."""
    statement = select(EnvironmentRow).where(
        EnvironmentRow.tenant_id == tenant_id,
        EnvironmentRow.id == environment_id,
        col(EnvironmentRow.deleted_at).is_(None),
    )
    if lock is not None:
        statement = statement.with_for_update(read=lock == "keep")
    return (await session.exec(statement)).one_or_none()


async def get_run(session: AsyncSession, tenant_id: str, environment_id: str, run_id: str) -> JobRow | None:
    statement = select(JobRow).where(
        JobRow.tenant_id == tenant_id,
        JobRow.id == run_id,
        JobRow.kind == "run",
        JobRow.environment_id == environment_id,
    )
    return (await session.exec(statement)).one_or_none()


async def pending_runs(session: AsyncSession, tenant_id: str) -> int:
    """How many of the tenant's runs have not ended."""
    statement = select(func.count()).where(
        JobRow.tenant_id == tenant_id, JobRow.kind == "run", JobRow.state == JobState.VALIDATING.value
    )
    return (await session.exec(statement)).one()
