"""One poller per process tells all event streams what is new.

Writers do not NOTIFY: in every commit that would halve their throughput. Instead one query per interval asks for the
new events of all jobs that are listened to, however many streams there are, and holds no connection in between.
`seq` is gapless in commit order, so "greater than the last one seen" misses nothing.
"""

from __future__ import annotations

import asyncio
import contextlib
from collections import deque
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from datetime import datetime
from typing import Any, NamedTuple

import structlog
from sqlalchemy import text
from sqlalchemy.ext.asyncio import AsyncEngine

from finery_service.db.engine import transaction

_KEPT = 512
_NEW = text("""
    select event.job_id, event.seq, event.type, event.data, event.created_at
    from unnest(cast(:jobs as text[]), cast(:seqs as bigint[])) as seen (job_id, seq)
    cross join lateral (
        select * from events where job_id = seen.job_id and seq > seen.seq order by seq limit 500
    ) as event
    order by event.job_id, event.seq
""")

log = structlog.get_logger("finery.api.events")


class EventRecord(NamedTuple):
    job_id: str
    seq: int
    type: str
    data: dict[str, Any]
    created_at: datetime


@dataclass(frozen=True)
class Frame:
    """An event, encoded once for all its readers."""

    seq: int
    payload: bytes
    ends: bool
    """The job has reached a terminal state with it."""


class Feed:
    """The newest events of one job, and a signal for their readers."""

    def __init__(self, seq: int) -> None:
        self.seq = seq
        """The last event that is known here."""
        self.readers = 0
        self.changed = asyncio.Event()
        """Set once, at the next change; then there is a fresh one."""
        self._frames: deque[Frame] = deque(maxlen=_KEPT)

    def after(self, seq: int) -> list[Frame] | None:
        """What is known to follow `seq`; None if that is no longer kept here and must be read from the database."""
        if seq >= self.seq:
            return []
        if not self._frames or seq < self._frames[0].seq - 1:
            return None
        return [frame for frame in self._frames if frame.seq > seq]

    def publish(self, frames: list[Frame]) -> None:
        self._frames.extend(frames)
        self.seq = frames[-1].seq
        self.wake()

    def wake(self) -> None:
        self.changed.set()
        self.changed = asyncio.Event()


class EventFeeds:
    """All feeds of the process. The poller runs while there is a reader."""

    def __init__(
        self, engine: AsyncEngine, encode: Callable[[EventRecord], Frame], *, interval_seconds: float = 0.15
    ) -> None:
        """`engine` sees all tenants: who may read is decided before a feed is asked for."""
        self.closed = False
        self._engine, self._encode, self._interval = engine, encode, interval_seconds
        self._feeds: dict[str, Feed] = {}
        self._poller: asyncio.Task[None] | None = None

    @contextlib.contextmanager
    def reading(self, job_id: str, seq: int) -> Iterator[Feed]:
        """The job's feed; `seq` is an event that exists, from which a new feed starts."""
        feed = self._feeds.setdefault(job_id, Feed(seq))
        feed.readers += 1
        if self._poller is None or self._poller.done():
            self._poller = asyncio.get_running_loop().create_task(self._poll())
        try:
            yield feed
        finally:
            feed.readers -= 1
            if feed.readers == 0:
                del self._feeds[job_id]

    async def close(self) -> None:
        """End all streams: their readers see `closed`."""
        self.closed = True
        for feed in self._feeds.values():
            feed.wake()
        if self._poller is not None:
            self._poller.cancel()
            await asyncio.gather(self._poller, return_exceptions=True)

    async def _poll(self) -> None:
        while self._feeds and not self.closed:
            try:
                await self._look()
            except Exception as error:
                # Whatever it is: without the poller all streams would stand still. They go on when it works again.
                log.warning("events cannot be read", error=type(error).__name__)
                await asyncio.sleep(1)
            await asyncio.sleep(self._interval)

    async def _look(self) -> None:
        seen = {job_id: feed.seq for job_id, feed in self._feeds.items()}
        async with transaction(self._engine) as session:
            rows = await session.execute(_NEW, {"jobs": list(seen), "seqs": list(seen.values())})
            records = [EventRecord._make(row) for row in rows]
        frames: dict[str, list[Frame]] = {}
        for record in records:
            frames.setdefault(record.job_id, []).append(self._encode(record))
        for job_id, news in frames.items():
            feed = self._feeds.get(job_id)
            # A feed that was dropped and made anew meanwhile may stand elsewhere.
            if feed is not None and feed.seq == seen[job_id]:
                feed.publish(news)
