"""Published checkpoints: what is in them, and the bytes."""

from __future__ import annotations

from sqlmodel.ext.asyncio.session import AsyncSession

from finery.types.checkpoints import Checkpoint, CheckpointFile
from finery.types.pages import Page
from finery_service.checkpoints import store
from finery_service.checkpoints.tables import CheckpointRow
from finery_service.errors import not_found
from finery_service.http.paging import is_id, page_of, to_page
from finery_service.jobs import service as jobs


async def get(session: AsyncSession, tenant_id: str, checkpoint_id: str) -> Checkpoint:
    row = await _require(session, tenant_id, checkpoint_id)
    return _to_checkpoint(row, (await store.model_names(session, [row.job_id]))[row.job_id])


async def list_page(
    session: AsyncSession, tenant_id: str, *, job_id: str | None, after: str | None, limit: int
) -> Page[Checkpoint]:
    """Oldest first, of one job or of all. Raises 404 for an unknown job."""
    where = [CheckpointRow.tenant_id == tenant_id]
    if job_id is not None:
        await jobs.require(session, tenant_id, job_id)
        where.append(CheckpointRow.job_id == job_id)
    rows, has_more = await page_of(session, CheckpointRow, *where, after=after, limit=limit, oldest_first=True)
    names = await store.model_names(session, [row.job_id for row in rows])
    return to_page([_to_checkpoint(row, names[row.job_id]) for row in rows], has_more)


async def locate(session: AsyncSession, tenant_id: str, checkpoint_id: str, path: str) -> tuple[str, CheckpointFile]:
    """The object's key and the file's entry. Raises 404 unless `path` is, letter by letter, one of the manifest's."""
    row = await _require(session, tenant_id, checkpoint_id)
    for file in _files(row):
        if file.path == path:
            return f"{row.prefix.rstrip('/')}/{file.path}", file
    raise not_found("checkpoint_file", path)


async def _require(session: AsyncSession, tenant_id: str, checkpoint_id: str) -> CheckpointRow:
    row = await store.get(session, tenant_id, checkpoint_id) if is_id(checkpoint_id) else None
    if row is None:
        raise not_found("checkpoint", checkpoint_id)
    return row


def _files(row: CheckpointRow) -> tuple[CheckpointFile, ...]:
    return tuple(CheckpointFile.model_validate(file) for file in row.files)


def _to_checkpoint(row: CheckpointRow, model: str) -> Checkpoint:
    return Checkpoint(
        id=row.id,
        job=row.job_id,
        project=row.project_id,
        step=row.step,
        final=row.final,
        model=model,
        files=_files(row),
        bytes=row.bytes,
        manifest=row.manifest,
        created_at=row.created_at,
    )
