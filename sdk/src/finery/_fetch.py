"""Fetches the files of a checkpoint, several at a time. What the bytes mean is decided in `_download`.

A task returns the tasks that follow from it; so nothing waits for another process while holding a place.
"""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable
from concurrent.futures import FIRST_COMPLETED, Future, ThreadPoolExecutor, wait
from functools import partial as bind

from finery import _calls
from finery._config import Config
from finery._download import Partial
from finery._retry import retry_delay
from finery._span import Span, Spoilt
from finery._transport import AsyncTransport, SyncTransport
from finery.errors import APIError

PARALLEL = 4
"""Connections of one download."""
_LOCK_POLL_SECONDS = 0.1
_SILENCE_SECONDS = 60.0


def fetch(transport: SyncTransport, checkpoint: str, files: list[Partial]) -> None:
    """All files in their place, hashes proved; the first error ends it."""
    fetcher = _Fetcher(transport, checkpoint)
    pool = ThreadPoolExecutor(PARALLEL, "finery-download")
    try:
        pending: set[Future[list[Task]]] = {pool.submit(fetcher.open, file) for file in files}
        while pending:
            done, pending = wait(pending, return_when=FIRST_COMPLETED)
            pending |= {pool.submit(task) for future in done for task in future.result()}
    finally:
        for file in files:
            file.meter.stopped = True
        pool.shutdown(cancel_futures=True)
        for file in files:
            file.close()


Task = Callable[[], "list[Task]"]


class _Fetcher:
    def __init__(self, transport: SyncTransport, checkpoint: str) -> None:
        self._transport = transport
        self._checkpoint = checkpoint

    def open(self, file: Partial) -> list[Task]:
        if not file.acquire():
            self._transport.config.runtime.sleep(_LOCK_POLL_SECONDS)
            return [bind(self.open, file)]
        file.resume()
        return self._go_on(file)

    def _go_on(self, file: Partial) -> list[Task]:
        while not file.meter.stopped and not file.settle():
            spans = file.start()
            if len(spans) > 1:
                return [bind(self._one_of, span) for span in spans]
            for span in spans:
                self._fill(span)
        return []

    def _one_of(self, span: Span) -> list[Task]:
        self._fill(span)
        return self._go_on(span.partial) if span.partial.finished() else []

    def _fill(self, span: Span) -> None:
        while span.wanted():
            try:
                call = _calls.download_file(self._checkpoint, span.partial.file.path, span.offset, span.limit)
                with self._transport.stream(call, _SILENCE_SECONDS) as answer:
                    span.begin(answer.status, answer.headers)
                    for chunk in answer.chunks:
                        span.write(chunk)
                span.end()
            except Spoilt:
                return
            except APIError as error:
                self._transport.config.runtime.sleep(_pause(span, error, self._transport.config))


async def fetch_async(transport: AsyncTransport, checkpoint: str, files: list[Partial]) -> None:
    """`fetch` on the event loop; files are hashed in threads."""
    fetcher = _AsyncFetcher(transport, checkpoint)
    done: set[asyncio.Task[list[AsyncTask]]] = set()
    pending = {asyncio.create_task(fetcher.gated(bind(fetcher.open, file))) for file in files}
    try:
        while pending:
            done, pending = await asyncio.wait(pending, return_when=asyncio.FIRST_COMPLETED)
            pending |= {asyncio.create_task(fetcher.gated(task)) for future in done for task in future.result()}
    finally:
        for file in files:
            file.meter.stopped = True
        for task in pending:
            task.cancel()
        await asyncio.gather(*done, *pending, return_exceptions=True)  # no error of another file is left unheard
        for file in files:
            file.close()


AsyncTask = Callable[[], Awaitable["list[AsyncTask]"]]


class _AsyncFetcher:
    def __init__(self, transport: AsyncTransport, checkpoint: str) -> None:
        self._transport = transport
        self._checkpoint = checkpoint
        self._gate = asyncio.Semaphore(PARALLEL)

    async def gated(self, task: AsyncTask) -> list[AsyncTask]:
        async with self._gate:
            return await task()

    async def open(self, file: Partial) -> list[AsyncTask]:
        if not file.acquire():
            await self._transport.config.runtime.sleep_async(_LOCK_POLL_SECONDS)
            return [bind(self.open, file)]
        await asyncio.to_thread(file.resume)
        return await self._go_on(file)

    async def _go_on(self, file: Partial) -> list[AsyncTask]:
        while not file.meter.stopped and not await asyncio.to_thread(file.settle):
            spans = file.start()
            if len(spans) > 1:
                return [bind(self._one_of, span) for span in spans]
            for span in spans:
                await self._fill(span)
        return []

    async def _one_of(self, span: Span) -> list[AsyncTask]:
        await self._fill(span)
        return await self._go_on(span.partial) if span.partial.finished() else []

    async def _fill(self, span: Span) -> None:
        while span.wanted():
            try:
                call = _calls.download_file(self._checkpoint, span.partial.file.path, span.offset, span.limit)
                async with self._transport.stream(call, _SILENCE_SECONDS) as answer:
                    span.begin(answer.status, answer.headers)
                    async for chunk in answer.chunks:
                        span.write(chunk)
                span.end()
            except Spoilt:
                return
            except APIError as error:
                await self._transport.config.runtime.sleep_async(_pause(span, error, self._transport.config))


def _pause(span: Span, error: APIError, config: Config) -> float:
    """Seconds until the next fetch; raises `error` if it is final or fetches keep bringing nothing."""
    failures = span.failed(error)
    if failures == 0:
        return 0.0
    delay = retry_delay(error, failures, max_attempts=config.max_attempts, random=config.runtime.random)
    if delay is None:
        raise error
    return delay
