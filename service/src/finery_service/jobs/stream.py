"""A job's events as server-sent events: gapless and in order, whoever connects, as often as they like."""

from __future__ import annotations

import asyncio
import json
import time
from collections.abc import AsyncIterator
from dataclasses import dataclass

from fastapi import Request
from fastapi.responses import StreamingResponse
from sqlalchemy.exc import SQLAlchemyError

from finery.types.jobs import TERMINAL, Event
from finery_service.auth.caller import Member
from finery_service.db.engine import transaction
from finery_service.db.notify import EventRecord, Frame
from finery_service.errors import ServiceError
from finery_service.http.context import Services
from finery_service.jobs import queries
from finery_service.jobs.service import check_cursor
from finery_service.keys import store as keys

MEDIA_TYPE = "text/event-stream"
_HEADERS = {"cache-control": "no-cache, no-transform", "x-accel-buffering": "no"}
_HELLO = b"retry: 1000\n\n"
_HEARTBEAT = b": heartbeat\n\n"
_DONE = b"event: done\ndata: {}\n\n"
_PAGE = 500
_MAX_SEQ = 2**63 - 1


def wants_stream(request: Request) -> bool:
    return MEDIA_TYPE in request.headers.get("accept", "").lower()


def cursor_of(request: Request, after: int) -> int:
    """`Last-Event-ID` if the client sent one (it reconnects, and its URL is still the old one), else `after`."""
    last = request.headers.get("last-event-id", "").strip()
    if not last:
        return after
    if not (last.isascii() and last.isdigit() and len(last) < 20 and int(last) <= _MAX_SEQ):
        message = "Expected the seq of an event, found another text; send the id of the last event that you read."
        raise ServiceError(400, "invalid_cursor", message, param="last-event-id")
    return int(last)


def encode(record: EventRecord) -> Frame:
    """An event as it goes over the wire. ASCII only, so that no reader takes U+2028 or U+0085 for an end of line."""
    event = Event(job=record.job_id, seq=record.seq, type=record.type, data=record.data, created_at=record.created_at)
    text = json.dumps(event.model_dump(mode="json"), allow_nan=False, separators=(",", ":"))
    payload = f"id: {record.seq}\nevent: {record.type}\ndata: {text}\n\n".encode("ascii")
    return Frame(record.seq, payload, record.type == "state" and record.data.get("to") in TERMINAL)


async def open_stream(services: Services, member: Member, job_id: str, after: int) -> StreamingResponse:
    """Everything that may be refused is refused here, before the 200."""
    async with transaction(services.app_engine, member.tenant_id) as session:
        state = await check_cursor(session, member.tenant_id, job_id, after)
        head = await queries.head(session, job_id)
    admitted = Admitted(services, member)
    watched = _Watched(member.tenant_id, job_id, head, ended=state in TERMINAL)
    return StreamingResponse(_frames(services, watched, after, admitted), media_type=MEDIA_TYPE, headers=_HEADERS)


@dataclass(frozen=True)
class _Watched:
    """A job when its stream was opened: no more of it, as there may be thousands of streams."""

    tenant_id: str
    id: str
    head: int
    """`seq` of its last event."""
    ended: bool


class Admitted:
    """Whether the key that opened a stream still stands; asked now and then, as a stream may last for days."""

    def __init__(self, services: Services, member: Member) -> None:
        self._services, self._member = services, member
        self._interval = 2 * services.settings.heartbeat_seconds
        self._next = time.monotonic() + self._interval

    async def still(self) -> bool:
        if time.monotonic() < self._next:
            return True
        self._next = time.monotonic() + self._interval
        try:
            async with transaction(self._services.app_engine, self._member.tenant_id) as session:
                return await keys.is_live(session, self._member.key_id)
        except (SQLAlchemyError, OSError):
            return True  # a database that is away revokes nothing


async def _frames(services: Services, job: _Watched, cursor: int, admitted: Admitted) -> AsyncIterator[bytes]:
    ended = job.ended
    with services.feeds.reading(job.id, job.head) as feed, services.metrics.streams.track_inprogress():
        yield _HELLO
        while not services.feeds.closed and await admitted.still():
            changed = feed.changed
            news = feed.after(cursor)
            if news is None or (ended and not news):
                # Too old for the feed; or a last look, at what was committed together with the end.
                news = await _read(services, job, cursor)
                if ended and not news:
                    yield _DONE
                    return
            for frame in news:
                yield frame.payload
                cursor, ended = frame.seq, ended or frame.ends
            if not news and not await _within(changed, services.settings.heartbeat_seconds):
                yield _HEARTBEAT


async def _read(services: Services, job: _Watched, cursor: int) -> list[Frame]:
    async with transaction(services.app_engine, job.tenant_id) as session:
        rows = await queries.events_after(session, job.tenant_id, job.id, cursor, _PAGE)
    return [encode(EventRecord(row.job_id, row.seq, row.type, row.data, row.created_at)) for row in rows]


async def _within(changed: asyncio.Event, seconds: float) -> bool:
    try:
        await asyncio.wait_for(changed.wait(), seconds)
    except TimeoutError:
        return False
    return True
