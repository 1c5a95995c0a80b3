from __future__ import annotations

import json
from collections.abc import Sequence
from typing import Literal, NamedTuple

from sqlalchemy import bindparam, text
from sqlmodel import col, select
from sqlmodel.ext.asyncio.session import AsyncSession

from finery.types.jobs import TERMINAL
from finery_service.checkpoints.tables import CheckpointRow
from finery_service.jobs.tables import JobRow
from finery_service.models.tables import ModelRow

Lock = Literal["keep", "change"]
"""Until the transaction ends: nobody else deletes the row, or nobody else even relies on it."""

_USERS = text("""
    select 'job' as kind, id, 'goes on from it' as why from jobs
    where tenant_id = :tenant and last_checkpoint_id = :checkpoint and state not in :ended
    union all
    select 'job', id, 'starts from it' from jobs
    where tenant_id = :tenant and state not in :ended
      and (from_checkpoint_id = :checkpoint or base @> cast(:part as jsonb))
    union all
    select 'checkpoint', other.id, 'lies on it' from checkpoints other
    join jobs job on job.tenant_id = other.tenant_id and job.id = other.job_id
    where other.tenant_id = :tenant and other.deleted_at is null and job.base @> cast(:part as jsonb)
    order by 1 desc, 2
    limit 20
""").bindparams(bindparam("ended", expanding=True))

_BEST = text("""
    select distinct on (job_id) id from checkpoints
    where job_id = any(:jobs) and deleted_at is null and coalesce(-validation_reward, validation_loss) is not null
    order by job_id, coalesce(-validation_reward, validation_loss), step
""")


class User(NamedTuple):
    kind: str
    """`job` or `checkpoint`"""
    id: str
    why: str
    """As in "job_… starts from it"."""


async def get(
    session: AsyncSession, tenant_id: str, checkpoint_id: str, *, lock: Lock | None = None
) -> CheckpointRow | None:
    """None for a deleted one, too."""
    statement = select(CheckpointRow).where(CheckpointRow.tenant_id == tenant_id, CheckpointRow.id == checkpoint_id)
    if lock is not None:
        statement = statement.with_for_update(read=lock == "keep")
    row = (await session.exec(statement, execution_options={"populate_existing": True})).one_or_none()
    return row if row is not None and row.deleted_at is None else None


async def users(session: AsyncSession, row: CheckpointRow) -> list[User]:
    """Who needs the checkpoint, the first 20: open jobs, and checkpoints whose base it is part of."""
    part = json.dumps([{"checkpoint": row.id}])
    arguments = {"tenant": row.tenant_id, "checkpoint": row.id, "part": part, "ended": sorted(TERMINAL)}
    return [User._make(found) for found in (await session.execute(_USERS, arguments)).all()]


async def best(session: AsyncSession, job_ids: Sequence[str]) -> set[str]:
    """Of each job the checkpoint that evaluated best (lowest loss; of RL highest reward), the earliest of equals."""
    return set((await session.execute(_BEST, {"jobs": list(job_ids)})).scalars().all())


async def model_names(session: AsyncSession, job_ids: Sequence[str]) -> dict[str, str]:
    """Names of the base models by job id."""
    statement = (
        select(JobRow.id, ModelRow.name)
        .join(ModelRow, col(ModelRow.id) == col(JobRow.model_id))
        .where(col(JobRow.id).in_(job_ids))
    )
    return dict((await session.exec(statement)).all())
