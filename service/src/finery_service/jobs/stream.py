"""A job's events as server-sent events: gapless and in order, whoever connects, as often as they like."""

from __future__ import annotations

import asyncio
import json
from collections.abc import AsyncIterator

from fastapi import Request
from fastapi.responses import StreamingResponse

from finery.types.jobs import TERMINAL, Event
from finery_service.db.engine import transaction
from finery_service.db.notify import EventRecord, Frame
from finery_service.errors import ServiceError
from finery_service.http.context import Services
from finery_service.jobs import queries
from finery_service.jobs.service import check_cursor
from finery_service.jobs.tables import JobRow

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


async def open_stream(services: Services, tenant_id: str, job_id: str, after: int) -> StreamingResponse:
    """Everything that may be refused is refused here, before the 200."""
    async with transaction(services.app_engine, tenant_id) as session:
        job = await check_cursor(session, tenant_id, job_id, after)
        head = await queries.head(session, job_id)
    return StreamingResponse(_frames(services, job, head, after), media_type=MEDIA_TYPE, headers=_HEADERS)


async def _frames(services: Services, job: JobRow, head: int, cursor: int) -> AsyncIterator[bytes]:
    ended = job.state in TERMINAL
    with services.feeds.reading(job.id, head) as feed, services.metrics.streams.track_inprogress():
        yield _HELLO
        while not services.feeds.closed:
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


async def _read(services: Services, job: JobRow, cursor: int) -> list[Frame]:
    async with transaction(services.app_engine, job.tenant_id) as session:
        rows = await queries.events_after(session, job.tenant_id, job.id, cursor, _PAGE)
    return [encode(EventRecord(row.job_id, row.seq, row.type, row.data, row.created_at)) for row in rows]


async def _within(changed: asyncio.Event, seconds: float) -> bool:
    try:
        await asyncio.wait_for(changed.wait(), seconds)
    except TimeoutError:
        return False
    return True
