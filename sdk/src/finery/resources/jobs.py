"""Jobs: create, watch, wait, cancel."""

from __future__ import annotations

import builtins
import itertools
from collections.abc import AsyncGenerator, Generator
from typing import Any

from finery import _calls, _wait
from finery._paging import AsyncPages, Pages
from finery._transport import AsyncTransport, SyncTransport
from finery._wait import Follower, OnEvent, OnEventAsync
from finery.types.jobs import Event, Job
from finery.types.methods import SftJobCreate


class Jobs:
    def __init__(self, transport: SyncTransport) -> None:
        self._transport = transport

    def create(
        self, request: SftJobCreate | None = None, /, *, idempotency_key: str | None = None, **fields: Any
    ) -> Job:
        """Submit a job: `create(method="sft", model=…, training_file=…, hyperparameters={…})`.

        The fields are those of `finery.types.methods`, as plain values or as its classes; a `File` or `Checkpoint`
        stands for its id. The server decides what is valid and names the field that is not. Retries keep one
        idempotency key; pass your own to make the call repeatable over restarts of your program.
        """
        key = idempotency_key or self._transport.config.runtime.new_key()
        return self._transport.send(_calls.create_job(_body(request, fields), key))

    def list(self, *, limit: int | None = None) -> Pages[Job]:
        """All jobs, newest first, fetched `limit` (≤ 100) at a time."""
        return Pages(self._transport.send, _calls.list_jobs(limit))

    def retrieve(self, job: Job | str) -> Job:
        return self._transport.send(_calls.retrieve_job(job))

    def cancel(self, job: Job | str) -> Job:
        """Ask for an end; a running job stores a checkpoint first. `ConflictError` if it has ended otherwise."""
        return self._transport.send(_calls.cancel_job(job, self._transport.config.runtime.new_key()))

    def events(self, job: Job | str, *, after: int = 0, limit: int | None = None) -> builtins.list[Event]:
        """The history so far, behind seq `after`, oldest first; at most `limit` events."""
        follower = Follower(_calls.id_of(job, "job"), after, self._transport.config)
        pages = Pages(self._transport.send, _calls.list_events(job, after))
        fresh = (event for event in pages if follower.advance(event))
        return builtins.list(itertools.islice(fresh, limit))

    def stream(self, job: Job | str, *, after: int = 0) -> Generator[Event, None, None]:
        """Events as they happen, from behind seq `after` to the job's end: gapless, none twice.

        It reconnects by itself over cuts and server restarts, for up to the client's `reconnect_timeout`.
        """
        return _wait.follow(self._transport, Follower(_calls.id_of(job, "job"), after, self._transport.config))

    def wait(
        self,
        job: Job | str,
        *,
        timeout: float | None = None,
        on_event: OnEvent | None = None,
        after: int = 0,
        raise_on_failure: bool = True,
    ) -> Job:
        """The job once it has ended. `on_event` sees every event behind seq `after`; `timeout` is in seconds.

        Raises `JobFailedError` (with `.job`) unless it succeeded, `WaitTimeoutError` after `timeout`.
        """
        ended = _wait.wait(self._transport, _calls.id_of(job, "job"), after, timeout, on_event)
        return _wait.settled(ended, raise_on_failure)


class AsyncJobs:
    def __init__(self, transport: AsyncTransport) -> None:
        self._transport = transport

    async def create(
        self, request: SftJobCreate | None = None, /, *, idempotency_key: str | None = None, **fields: Any
    ) -> Job:
        """Submit a job: `create(method="sft", model=…, training_file=…, hyperparameters={…})`.

        The fields are those of `finery.types.methods`, as plain values or as its classes; a `File` or `Checkpoint`
        stands for its id. The server decides what is valid and names the field that is not. Retries keep one
        idempotency key; pass your own to make the call repeatable over restarts of your program.
        """
        key = idempotency_key or self._transport.config.runtime.new_key()
        return await self._transport.send(_calls.create_job(_body(request, fields), key))

    def list(self, *, limit: int | None = None) -> AsyncPages[Job]:
        """All jobs, newest first, fetched `limit` (≤ 100) at a time."""
        return AsyncPages(self._transport.send, _calls.list_jobs(limit))

    async def retrieve(self, job: Job | str) -> Job:
        return await self._transport.send(_calls.retrieve_job(job))

    async def cancel(self, job: Job | str) -> Job:
        """Ask for an end; a running job stores a checkpoint first. `ConflictError` if it has ended otherwise."""
        return await self._transport.send(_calls.cancel_job(job, self._transport.config.runtime.new_key()))

    async def events(self, job: Job | str, *, after: int = 0, limit: int | None = None) -> builtins.list[Event]:
        """The history so far, behind seq `after`, oldest first; at most `limit` events."""
        follower = Follower(_calls.id_of(job, "job"), after, self._transport.config)
        pages = AsyncPages(self._transport.send, _calls.list_events(job, after))
        events: builtins.list[Event] = []
        async for event in pages:
            if limit is not None and len(events) >= limit:
                break
            if follower.advance(event):
                events.append(event)
        return events

    def stream(self, job: Job | str, *, after: int = 0) -> AsyncGenerator[Event, None]:
        """Events as they happen, from behind seq `after` to the job's end: gapless, none twice.

        It reconnects by itself over cuts and server restarts, for up to the client's `reconnect_timeout`.
        """
        return _wait.follow_async(self._transport, Follower(_calls.id_of(job, "job"), after, self._transport.config))

    async def wait(
        self,
        job: Job | str,
        *,
        timeout: float | None = None,  # noqa: ASYNC109 (the same signature as the sync one)
        on_event: OnEventAsync | None = None,
        after: int = 0,
        raise_on_failure: bool = True,
    ) -> Job:
        """The job once it has ended. `on_event` (plain or async) sees every event behind seq `after`.

        Raises `JobFailedError` (with `.job`) unless it succeeded, `WaitTimeoutError` after `timeout` seconds.
        """
        ended = await _wait.wait_async(self._transport, _calls.id_of(job, "job"), after, timeout, on_event)
        return _wait.settled(ended, raise_on_failure)


def _body(request: SftJobCreate | None, fields: dict[str, Any]) -> SftJobCreate | dict[str, Any]:
    if request is None:
        return fields
    if fields:
        raise TypeError(f"expected a request or fields, found both: {', '.join(sorted(fields))}")
    return request
