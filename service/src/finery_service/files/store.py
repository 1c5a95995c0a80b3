from __future__ import annotations

from typing import Any, Literal

from sqlmodel import col, or_, select
from sqlmodel.ext.asyncio.session import AsyncSession

from finery.types.jobs import TERMINAL
from finery_service.environments.tables import EnvironmentRow
from finery_service.files.tables import FileRow
from finery_service.jobs.tables import JobRow

_NAMED = 5


Lock = Literal["keep", "change"]
"""Until the transaction ends: nobody else deletes the row, or nobody else even relies on it."""


async def get(session: AsyncSession, tenant_id: str, file_id: str, *, lock: Lock | None = None) -> FileRow | None:
    """None for a deleted one, too."""
    statement = select(FileRow).where(
        FileRow.tenant_id == tenant_id, FileRow.id == file_id, col(FileRow.deleted_at).is_(None)
    )
    if lock is not None:
        statement = statement.with_for_update(read=lock == "keep")
    return (await session.exec(statement)).one_or_none()


async def twin(session: AsyncSession, tenant_id: str, sha256: str, *, keep: bool = False) -> FileRow | None:
    """A file of the same content, the first of them. `keep`: it is not deleted before the transaction ends."""
    statement = select(FileRow).where(
        FileRow.tenant_id == tenant_id, FileRow.sha256 == sha256, col(FileRow.deleted_at).is_(None)
    )
    statement = statement.order_by(col(FileRow.created_at), col(FileRow.id)).limit(1)
    if keep:
        statement = statement.with_for_update(read=True)
    return (await session.exec(statement, execution_options={"populate_existing": True})).first()


async def is_shared(session: AsyncSession, row: FileRow) -> bool:
    """Whether a file that is not deleted has the same object."""
    statement = select(FileRow.id).where(
        FileRow.tenant_id == row.tenant_id,
        FileRow.sha256 == row.sha256,
        FileRow.object_key == row.object_key,
        col(FileRow.deleted_at).is_(None),
    )
    return (await session.exec(statement.limit(1))).first() is not None


async def users(session: AsyncSession, row: FileRow) -> list[str]:
    """Ids of jobs, previews and runs that have not ended and read the file, else of environments whose prompts are in
    it; the first few."""
    statement = (
        select(JobRow.id)
        .where(
            JobRow.tenant_id == row.tenant_id,
            or_(col(JobRow.training_file_id) == row.id, col(JobRow.validation_file_id) == row.id),
            col(JobRow.state).not_in(sorted(TERMINAL)),
        )
        .order_by(col(JobRow.created_at), col(JobRow.id))
    )
    found = list((await session.exec(statement.limit(_NAMED))).all())
    return found or await _environments(session, row)


async def _environments(session: AsyncSession, row: FileRow) -> list[str]:
    spec: Any = EnvironmentRow.spec
    statement = (
        select(EnvironmentRow.id)
        .where(
            EnvironmentRow.tenant_id == row.tenant_id,
            col(EnvironmentRow.deleted_at).is_(None),
            or_(spec["file"].astext == row.id, spec["held_out_file"].astext == row.id),
        )
        .order_by(col(EnvironmentRow.created_at), col(EnvironmentRow.id))
    )
    return list((await session.exec(statement.limit(_NAMED))).all())
