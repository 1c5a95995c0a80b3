"""Published checkpoints: what is in them, and the bytes."""

from __future__ import annotations

from collections.abc import Sequence
from datetime import datetime

from sqlmodel import col
from sqlmodel.ext.asyncio.session import AsyncSession

from finery.types.checkpoints import Checkpoint, CheckpointFile
from finery.types.pages import Page
from finery_service.checkpoints import store
from finery_service.checkpoints.tables import CheckpointRow
from finery_service.errors import ServiceError, not_found
from finery_service.http.paging import is_id, page_of, to_page
from finery_service.jobs import service as jobs


async def get(session: AsyncSession, tenant_id: str, checkpoint_id: str) -> Checkpoint:
    row = await _require(session, tenant_id, checkpoint_id)
    [checkpoint] = await _to_checkpoints(session, [row])
    return checkpoint


async def list_page(
    session: AsyncSession, tenant_id: str, *, job_id: str | None, after: str | None, limit: int
) -> Page[Checkpoint]:
    """Oldest first, of one job or of all. Raises 404 for an unknown job."""
    where = [CheckpointRow.tenant_id == tenant_id]
    if job_id is not None:
        await jobs.require_state(session, tenant_id, job_id)
        where.append(CheckpointRow.job_id == job_id)
    filters = [col(CheckpointRow.deleted_at).is_(None)]
    rows, has_more = await page_of(
        session, CheckpointRow, *where, after=after, limit=limit, oldest_first=True, filters=filters
    )
    return to_page(await _to_checkpoints(session, rows), has_more)


async def delete(session: AsyncSession, tenant_id: str, checkpoint_id: str, now: datetime) -> CheckpointRow:
    """The row stays, for the jobs and bills that name it; its objects are the caller's to purge after the commit.

    Raises 409 naming who needs it.
    """
    row = await _require(session, tenant_id, checkpoint_id, lock="change")
    users = await store.users(session, row)
    if users:
        who = f"{users[0].kind} {users[0].id} {users[0].why}" + (f", and {len(users) - 1} more" if users[1:] else "")
        advice = "cancel the job or wait for its end" if users[0].kind == "job" else "delete that one first"
        message = f"Expected a checkpoint that nothing needs, found that {who}; {advice}."
        details = [{user.kind: user.id, "why": user.why} for user in users]
        raise ServiceError(409, "checkpoint_in_use", message, details=details, headers={"x-should-retry": "false"})
    row.deleted_at = now
    await session.flush()
    return row


async def locate(session: AsyncSession, tenant_id: str, checkpoint_id: str, path: str) -> tuple[str, CheckpointFile]:
    """The object's key and the file's entry. Raises 404 unless `path` is, letter by letter, one of the manifest's."""
    row = await _require(session, tenant_id, checkpoint_id)
    for file in _files(row):
        if file.path == path:
            return f"{row.prefix.rstrip('/')}/{file.path}", file
    raise not_found("checkpoint_file", path)


async def _require(
    session: AsyncSession, tenant_id: str, checkpoint_id: str, *, lock: store.Lock | None = None
) -> CheckpointRow:
    row = await store.get(session, tenant_id, checkpoint_id, lock=lock) if is_id(checkpoint_id) else None
    if row is None:
        raise not_found("checkpoint", checkpoint_id)
    return row


def _files(row: CheckpointRow) -> tuple[CheckpointFile, ...]:
    return tuple(CheckpointFile.model_validate(file) for file in row.files)


async def _to_checkpoints(session: AsyncSession, rows: Sequence[CheckpointRow]) -> list[Checkpoint]:
    job_ids = sorted({row.job_id for row in rows})
    names, best = await store.model_names(session, job_ids), await store.best(session, job_ids)
    return [_to_checkpoint(row, names[row.job_id], is_best=row.id in best) for row in rows]


def _to_checkpoint(row: CheckpointRow, model: str, *, is_best: bool) -> Checkpoint:
    return Checkpoint(
        id=row.id,
        job=row.job_id,
        project=row.project_id,
        step=row.step,
        final=row.final,
        kind=row.kind,
        validation_loss=row.validation_loss,
        validation_reward=row.validation_reward,
        best=is_best,
        model=model,
        files=_files(row),
        bytes=row.bytes,
        manifest=row.manifest,
        created_at=row.created_at,
    )
