"""Following a job's events over cuts, restarts and proxies, and waiting for its end."""

from __future__ import annotations

import inspect
from collections.abc import AsyncGenerator, Awaitable, Callable, Generator, Mapping
from contextlib import aclosing, closing

from pydantic import ValidationError

from finery import _calls
from finery._config import Config
from finery._display import display
from finery._retry import LONGEST_RETRY_AFTER, backoff, retryable
from finery._sse import ServerEvent, SseParser
from finery._transport import AsyncTransport, SyncTransport
from finery.errors import APIError, EventGapError, FineryError, JobFailedError, WaitTimeoutError
from finery.types.jobs import TERMINAL, Event, Job

OnEvent = Callable[[Event], object]
OnEventAsync = Callable[[Event], object | Awaitable[object]]
SILENCE_SECONDS = 45.0
"""The server sends a heartbeat every 15 s or sooner; three missed ones mean that the connection is dead."""


class Follower:
    """Decides what bytes and failures mean. It neither sends nor sleeps.

    `cursor` is the last seq handed out; `deadline` (monotonic, or None) bounds the whole wait.
    """

    def __init__(self, job: str, after: int, config: Config, timeout: float | None = None) -> None:
        self.job = job
        self.cursor = after
        self._done = False
        self._config = config
        self._now = config.runtime.monotonic
        self._timeout = timeout
        self._deadline = None if timeout is None else self._now() + timeout
        self._last_sign = self._now()
        self._failures = 0
        self._state: object = None
        self._parser = SseParser()

    def ended(self) -> bool:
        """The server said that nothing more will come."""
        return self._done

    def go_on(self) -> None:
        self._done = False

    def read_timeout(self) -> float:
        """Seconds of silence to bear."""
        if self._deadline is None:
            return SILENCE_SECONDS
        return max(0.05, min(SILENCE_SECONDS, self._deadline - self._now()))

    def connected(self, headers: Mapping[str, str]) -> None:
        kind = headers.get("content-type", "no content type")
        if not kind.lower().startswith("text/event-stream"):
            raise FineryError(f"Expected a stream of events from job {self.job}, found {kind}; check the base URL.")
        self._parser = SseParser()

    def feed(self, chunk: bytes) -> list[Event]:
        self._last_sign = self._now()
        self._failures = 0
        events = []
        for raw in self._parser.feed(chunk):
            event = self._accept(raw)
            if event is not None:
                events.append(event)
        if not self._done:
            self._check_deadline()
        return events

    def pause(self, error: APIError | None) -> float:
        """Seconds until the next try, after `error` or (None) an end without `done`. Raises what ends the stream."""
        self._check_deadline()
        if error is not None and not retryable(error):
            raise error
        self._failures += 1
        silent = self._now() - self._last_sign
        if silent >= self._config.reconnect_timeout:
            raise error or APIError(
                f"The event stream of job {self.job} kept ending for {silent:.0f} s after event {self.cursor}.",
                code="connection_error",
            )
        delay = backoff(self._failures, self._config.runtime.random, longest=5.0)
        if error is not None and error.retry_after is not None:
            delay = max(delay, min(error.retry_after, LONGEST_RETRY_AFTER))
        return delay if self._deadline is None else min(delay, max(0.0, self._deadline - self._now()))

    def _accept(self, raw: ServerEvent) -> Event | None:
        if self._done:
            return None
        if raw.type == "done":
            self._done = True
            return None
        if raw.type == "gap":
            raise EventGapError(
                f"Job {self.job}: the server no longer has the events after {self.cursor} ({raw.data}); "
                "start again with a later `after`, or read what there is with jobs.events."
            )
        try:
            event = Event.model_validate_json(raw.data)
        except ValidationError as error:
            found = f"{raw.type!r} with {raw.data[:200]!r}"
            raise FineryError(f"Job {self.job}: expected an event after {self.cursor}, found {found}") from error
        return event if self.advance(event) else None

    def advance(self, event: Event) -> bool:
        """Move the cursor over `event`. False: it was handed out before. Raises on a hole in the history."""
        if event.seq <= self.cursor:
            return False
        if event.seq > self.cursor + 1:
            raise EventGapError(
                f"Job {self.job}: expected event {self.cursor + 1}, found {event.seq}; the history has no gaps by "
                f"contract. Read it again with jobs.events({self.job!r}, after={self.cursor})."
            )
        self.cursor = event.seq
        if event.type == "state":
            self._state = event.data.get("to")
        return True

    def _check_deadline(self) -> None:
        if self._deadline is not None and self._now() >= self._deadline:
            rest = "it goes on. Wait again."
            if self._state == "paused":
                rest = f"it is paused. Let it go on with jobs.resume({self.job!r})."
            raise WaitTimeoutError(f"Job {self.job} did not end within {self._timeout} s; {rest}")


def follow(transport: SyncTransport, follower: Follower) -> Generator[Event, None, None]:
    """Events from the cursor on until `done`; reconnects by itself."""
    while not follower.ended():
        error: APIError | None = None
        try:
            call = _calls.stream_events(follower.job, follower.cursor)
            with transport.stream(call, follower.read_timeout()) as answer:
                follower.connected(answer.headers)
                for chunk in answer.chunks:
                    yield from follower.feed(chunk)
                    if follower.ended():
                        return
        except APIError as caught:
            error = caught
        transport.config.runtime.sleep(follower.pause(error))


async def follow_async(transport: AsyncTransport, follower: Follower) -> AsyncGenerator[Event, None]:
    """Events from the cursor on until `done`; reconnects by itself."""
    while not follower.ended():
        error: APIError | None = None
        try:
            call = _calls.stream_events(follower.job, follower.cursor)
            async with transport.stream(call, follower.read_timeout()) as answer:
                follower.connected(answer.headers)
                async for chunk in answer.chunks:
                    for event in follower.feed(chunk):
                        yield event
                    if follower.ended():
                        return
        except APIError as caught:
            error = caught
        await transport.config.runtime.sleep_async(follower.pause(error))


def shown(events: Generator[Event, None, None], progress: bool | None, label: str) -> Generator[Event, None, None]:
    """The same events, drawn as they pass."""
    with closing(events), display(progress, label) as show:
        for event in events:
            show(event)
            yield event


async def shown_async(
    events: AsyncGenerator[Event, None], progress: bool | None, label: str
) -> AsyncGenerator[Event, None]:
    """The same events, drawn as they pass."""
    async with aclosing(events):
        with display(progress, label) as show:
            async for event in events:
                show(event)
                yield event


def wait(transport: SyncTransport, job: str, after: int, timeout: float | None, on_event: OnEvent | None) -> Job:
    """The job once its state is terminal."""
    follower = Follower(job, after, transport.config, timeout)
    while True:
        for event in follow(transport, follower):
            if on_event is not None:
                on_event(event)
        error: APIError | None = None
        try:
            ended = transport.send(_calls.retrieve_job(job))
            if ended.state in TERMINAL:
                return ended
            follower.go_on()  # a paused job's stream may end too; its history goes on
        except APIError as caught:
            error = caught
        transport.config.runtime.sleep(follower.pause(error))


async def wait_async(
    transport: AsyncTransport,
    job: str,
    after: int,
    timeout: float | None,  # noqa: ASYNC109 (the same signature as the sync one)
    on_event: OnEventAsync | None,
) -> Job:
    """The job once its state is terminal."""
    follower = Follower(job, after, transport.config, timeout)
    while True:
        async with aclosing(follow_async(transport, follower)) as events:
            async for event in events:
                result = on_event(event) if on_event is not None else None
                if inspect.isawaitable(result):
                    await result
        error: APIError | None = None
        try:
            ended = await transport.send(_calls.retrieve_job(job))
            if ended.state in TERMINAL:
                return ended
            follower.go_on()
        except APIError as caught:
            error = caught
        await transport.config.runtime.sleep_async(follower.pause(error))


def settled(job: Job, raise_on_failure: bool) -> Job:
    if raise_on_failure and job.state != "succeeded":
        raise JobFailedError(job)
    return job
