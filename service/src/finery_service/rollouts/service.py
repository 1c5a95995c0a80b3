"""Rollouts of a job, read from where its workers stored them. They are kept as long as the job: for ever."""

from __future__ import annotations

import asyncio
import json
import re
from collections.abc import Sequence
from contextlib import aclosing

from obstore.store import ObjectStore
from pydantic import ValidationError
from sqlmodel.ext.asyncio.session import AsyncSession

from finery.types.pages import Page
from finery.types.rollouts import Rollout, RolloutKind
from finery_service.errors import ServiceError
from finery_service.http.paging import PAGE_BYTES, to_page
from finery_service.jobs import service as jobs
from finery_service.rollouts import store as rows
from finery_service.rollouts.reading import Line, Offsets, lines
from finery_service.rollouts.store import Place
from finery_service.rollouts.tables import RolloutFileRow

_ID = re.compile(r"roll_(e?)([0-9]{1,15})_([0-9]{1,15})")


async def files(
    session: AsyncSession,
    tenant_id: str,
    job_id: str,
    *,
    step: int | None,
    kind: RolloutKind | None,
    after: str | None,
    limit: int,
) -> tuple[list[RolloutFileRow], int]:
    """Where a page is, and the number of its first rollout in the first file; the last file may lie beyond the page.

    Raises 404 for the job, 400 for an `after` that is no rollout of this list.
    """
    await jobs.require_state(session, tenant_id, job_id)
    place = None if after is None else _place(after)
    # Every one of them holds at least one rollout, and one more than the page tells whether there is more.
    found = await rows.files(session, tenant_id, job_id, step=step, kind=kind, start=place, limit=limit + 2)
    if place is None:
        return found, 0
    first = found[0] if found else None
    # It may have fewer rollouts than it had: a later attempt has done the step again meanwhile.
    if first is None or rows.place(first.step, _kind(first), place.number) != place:
        raise _no_cursor()
    return found, place.number + 1


async def read_page(
    store: ObjectStore, files: Sequence[RolloutFileRow], first: int, limit: int, offsets: Offsets
) -> Page[Rollout]:
    """Up to `limit` rollouts, fewer if they are long. Outside of any transaction."""
    page: list[Rollout] = []
    room = PAGE_BYTES
    for file in files:
        if first < file.count and (len(page) == limit or room <= 0):
            return to_page(page, has_more=True)
        taken = await _read(store, file, first, limit - len(page), room, offsets)
        room -= sum(len(line.content) for line in taken)
        page += await asyncio.to_thread(_parse, file, taken)
        if taken and taken[-1].number + 1 < file.count:
            return to_page(page, has_more=True)
        first = 0
    return to_page(page, has_more=False)


async def _read(
    store: ObjectStore, file: RolloutFileRow, first: int, limit: int, room: int, offsets: Offsets
) -> list[Line]:
    """Lines of one file from `first` on: up to `limit`, and not beyond the one that fills `room` bytes."""
    taken: list[Line] = []
    if first >= file.count:
        return taken
    async with aclosing(lines(store, file.object_key, file.bytes, first, offsets)) as found:
        async for line in found:
            taken.append(line)
            room -= len(line.content)
            if len(taken) == limit or room <= 0:
                break
    if not taken:
        raise ValueError(f"expected {file.count} rollouts in {file.object_key}, found at most {first}")
    offsets.keep(file.object_key, taken[-1].number + 1, taken[-1].end)
    return taken


def _parse(file: RolloutFileRow, taken: Sequence[Line]) -> list[Rollout]:
    """Raises ValueError for what is not as the worker said: an id is where its rollout lies."""
    found = []
    for line in taken:
        try:
            rollout = _rollout(line.content)
        except ValueError:  # its text is the customer's: it stays out of the log
            raise ValueError(f"expected a rollout in line {line.number} of {file.object_key}, found none") from None
        expected = f"roll_{'e' if file.kind == 'eval' else ''}{file.step}_{line.number}"
        if (rollout.id, rollout.job) != (expected, file.job_id):
            raise ValueError(f"expected {expected} of {file.job_id} in {file.object_key}, found {rollout.id[:80]}")
        found.append(rollout)
    return found


def _rollout(content: bytes) -> Rollout:
    """Half a character, which a grader may print, is no JSON for pydantic: it is shown as U+FFFD."""
    try:
        return Rollout.model_validate_json(content)
    except ValidationError:
        text = json.dumps(json.loads(content), ensure_ascii=False)
        return Rollout.model_validate_json(text.encode("utf-16", "surrogatepass").decode("utf-16", "replace"))


def _place(rollout_id: str) -> Place:
    match = _ID.fullmatch(rollout_id)
    if match is None:
        raise _no_cursor()
    return rows.place(int(match[2]), "eval" if match[1] else "train", int(match[3]))


def _kind(file: RolloutFileRow) -> RolloutKind:
    return "eval" if file.kind == "eval" else "train"


def _no_cursor() -> ServiceError:
    message = "Expected the id of a rollout of this list, found another text; pass a page's last_id."
    return ServiceError(400, "invalid_cursor", message, param="after")
