"""Checkpoints and the download of their files."""

from __future__ import annotations

import asyncio
import os
from pathlib import Path

from finery import _calls
from finery._config import Config
from finery._download import LOCK_POLL_SECONDS, Partial, partials
from finery._paging import AsyncPages, Pages
from finery._retry import retry_delay
from finery._transport import AsyncTransport, Progress, SyncTransport
from finery.errors import APIError
from finery.types.checkpoints import Checkpoint
from finery.types.jobs import Job

_SILENCE_SECONDS = 60.0


class Checkpoints:
    def __init__(self, transport: SyncTransport) -> None:
        self._transport = transport

    def list(self, *, job: Job | str | None = None, limit: int | None = None) -> Pages[Checkpoint]:
        """Checkpoints of a job, or of all, oldest first."""
        return Pages(self._transport.send, _calls.list_checkpoints(job, limit))

    def retrieve(self, checkpoint: Checkpoint | str) -> Checkpoint:
        return self._transport.send(_calls.retrieve_checkpoint(checkpoint))

    def download(
        self, checkpoint: Checkpoint | str, folder: str | os.PathLike[str], *, on_progress: Progress | None = None
    ) -> Path:
        """Fetch all files into `folder` and return it. Every file has its sha256 proved before it gets its name.

        Call it again after an interruption: only the missing bytes are fetched. `on_progress(done, total)`: bytes.
        """
        found = self.retrieve(checkpoint)
        for partial in partials(found, Path(folder), on_progress):
            try:
                self._fetch(found.id, partial)
            finally:
                partial.close()
        return Path(folder)

    def _fetch(self, checkpoint: str, partial: Partial) -> None:
        runtime = self._transport.config.runtime
        while not partial.acquire():
            runtime.sleep(LOCK_POLL_SECONDS)
        partial.resume()
        while not partial.settle():
            try:
                call = _calls.download_file(checkpoint, partial.file.path, partial.offset)
                with self._transport.stream(call, _SILENCE_SECONDS) as answer:
                    partial.begin(answer.status, answer.headers)
                    for chunk in answer.chunks:
                        partial.write(chunk)
                partial.end()
            except APIError as error:
                runtime.sleep(_pause(partial, error, self._transport.config))


class AsyncCheckpoints:
    def __init__(self, transport: AsyncTransport) -> None:
        self._transport = transport

    def list(self, *, job: Job | str | None = None, limit: int | None = None) -> AsyncPages[Checkpoint]:
        """Checkpoints of a job, or of all, oldest first."""
        return AsyncPages(self._transport.send, _calls.list_checkpoints(job, limit))

    async def retrieve(self, checkpoint: Checkpoint | str) -> Checkpoint:
        return await self._transport.send(_calls.retrieve_checkpoint(checkpoint))

    async def download(
        self, checkpoint: Checkpoint | str, folder: str | os.PathLike[str], *, on_progress: Progress | None = None
    ) -> Path:
        """Fetch all files into `folder` and return it. Every file has its sha256 proved before it gets its name.

        Call it again after an interruption: only the missing bytes are fetched. `on_progress(done, total)`: bytes.
        """
        found = await self.retrieve(checkpoint)
        for partial in partials(found, Path(folder), on_progress):
            try:
                await self._fetch(found.id, partial)
            finally:
                partial.close()
        return Path(folder)

    async def _fetch(self, checkpoint: str, partial: Partial) -> None:
        runtime = self._transport.config.runtime
        while not partial.acquire():
            await runtime.sleep_async(LOCK_POLL_SECONDS)
        await asyncio.to_thread(partial.resume)
        while not partial.settle():
            try:
                call = _calls.download_file(checkpoint, partial.file.path, partial.offset)
                async with self._transport.stream(call, _SILENCE_SECONDS) as answer:
                    partial.begin(answer.status, answer.headers)
                    async for chunk in answer.chunks:
                        partial.write(chunk)
                partial.end()
            except APIError as error:
                await runtime.sleep_async(_pause(partial, error, self._transport.config))


def _pause(partial: Partial, error: APIError, config: Config) -> float:
    """Seconds until the next fetch; raises `error` if it is final or fetches keep bringing nothing."""
    failures = partial.failed(error)
    if failures == 0:
        return 0.0
    delay = retry_delay(error, failures, max_attempts=config.max_attempts, random=config.runtime.random)
    if delay is None:
        raise error
    return delay
