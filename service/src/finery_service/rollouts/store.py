"""Which objects hold a job's rollouts. The latest attempt that did a step has its row."""

from __future__ import annotations

from datetime import datetime
from typing import NamedTuple, Protocol

from sqlalchemy import case, tuple_
from sqlalchemy.dialects.postgresql import insert
from sqlmodel import col, select
from sqlmodel.ext.asyncio.session import AsyncSession

from finery.types.rollouts import RolloutKind
from finery_service.jobs.tables import AttemptRow, JobRow
from finery_service.rollouts.tables import RolloutFileRow

_ORDER: dict[str, int] = {"train": 0, "eval": 1}
"""A step is evaluated after it is done."""


class Stored(Protocol):
    """An object that is uploaded already, as in `worker.proto`'s `RolloutFile`."""

    @property
    def key(self) -> str: ...
    @property
    def sha256(self) -> str: ...
    @property
    def bytes(self) -> int: ...
    @property
    def count(self) -> int: ...


class Place(NamedTuple):
    """Of a rollout among all of its job, in the order in which they are listed."""

    step: int
    order: int
    """Of its kind: see `place`."""
    number: int
    """Its line in the file, from 0."""


def place(step: int, kind: RolloutKind, number: int) -> Place:
    return Place(step, _ORDER[kind], number)


async def put(
    session: AsyncSession, job: JobRow, attempt: AttemptRow, kind: RolloutKind, step: int, file: Stored, now: datetime
) -> None:
    """Takes the place of what an earlier attempt stored for the step. As finery_system, under the attempt's fence."""
    values = {
        "tenant_id": job.tenant_id,
        "job_id": job.id,
        "kind": kind,
        "step": step,
        "attempt_id": attempt.id,
        "object_key": file.key,
        "sha256": file.sha256,
        "bytes": file.bytes,
        "count": file.count,
        "created_at": now,
    }
    statement = insert(RolloutFileRow).values(**values)
    key = ("job_id", "kind", "step")
    replaced = {name: statement.excluded[name] for name in values if name not in key}
    await session.execute(statement.on_conflict_do_update(index_elements=key, set_=replaced))


async def files(
    session: AsyncSession,
    tenant_id: str,
    job_id: str,
    *,
    step: int | None,
    kind: RolloutKind | None,
    start: Place | None,
    limit: int,
) -> list[RolloutFileRow]:
    """Those that hold any rollouts, oldest first, from the one of `start` on."""
    order = case(_ORDER, value=col(RolloutFileRow.kind))
    statement = select(RolloutFileRow).where(
        RolloutFileRow.tenant_id == tenant_id, RolloutFileRow.job_id == job_id, RolloutFileRow.count > 0
    )
    if step is not None:
        statement = statement.where(RolloutFileRow.step == step)
    if kind is not None:
        statement = statement.where(RolloutFileRow.kind == kind)
    if start is not None:
        statement = statement.where(
            RolloutFileRow.step >= start.step,  # follows from the next; the primary key serves this one
            tuple_(col(RolloutFileRow.step), order) >= tuple_(start.step, start.order),
        )
    statement = statement.order_by(col(RolloutFileRow.step), order).limit(limit)
    return list((await session.exec(statement)).all())
