from __future__ import annotations

from collections.abc import Sequence

from sqlmodel import col, select
from sqlmodel.ext.asyncio.session import AsyncSession

from finery_service.checkpoints.tables import CheckpointRow
from finery_service.jobs.tables import JobRow
from finery_service.models.tables import ModelRow


async def get(session: AsyncSession, tenant_id: str, checkpoint_id: str) -> CheckpointRow | None:
    statement = select(CheckpointRow).where(CheckpointRow.tenant_id == tenant_id, CheckpointRow.id == checkpoint_id)
    return (await session.exec(statement)).one_or_none()


async def model_names(session: AsyncSession, job_ids: Sequence[str]) -> dict[str, str]:
    """Names of the base models by job id."""
    statement = (
        select(JobRow.id, ModelRow.name)
        .join(ModelRow, col(ModelRow.id) == col(JobRow.model_id))
        .where(col(JobRow.id).in_(job_ids))
    )
    return dict((await session.exec(statement)).all())
