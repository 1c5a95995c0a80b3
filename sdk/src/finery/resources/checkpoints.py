"""Checkpoints and the download of their files."""

from __future__ import annotations

import os
from pathlib import Path

from finery import _calls
from finery._download import Meter, Partial, partials
from finery._fetch import fetch, fetch_async
from finery._paging import AsyncPages, Pages
from finery._transport import AsyncTransport, Progress, SyncTransport
from finery.errors import FineryError
from finery.types.checkpoints import Checkpoint
from finery.types.jobs import Job


class Checkpoints:
    def __init__(self, transport: SyncTransport) -> None:
        self._transport = transport

    def list(self, *, job: Job | str | None = None, limit: int | None = None) -> Pages[Checkpoint]:
        """Checkpoints of a job, or of all, oldest first."""
        return Pages(self._transport.send, _calls.list_checkpoints(job, limit))

    def retrieve(self, checkpoint: Checkpoint | str) -> Checkpoint:
        return self._transport.send(_calls.retrieve_checkpoint(checkpoint))

    def best(self, job: Job | str) -> Checkpoint:
        """The one that evaluated best so far: by validation loss, or by held-out reward (RL).

        Raises `FineryError` if the job has none.
        """
        return self.retrieve(_best_of(self._transport.send(_calls.retrieve_job(job))))

    def delete(self, checkpoint: Checkpoint | str) -> None:
        """Delete it for good. `ConflictError` while a job needs it."""
        self._transport.send(_calls.delete_checkpoint(checkpoint))

    def download(
        self, checkpoint: Checkpoint | str, folder: str | os.PathLike[str], *, on_progress: Progress | None = None
    ) -> Path:
        """Fetch all files into `folder` and return it. Every file has its sha256 proved before it gets its name.

        Four connections at a time, big files in several pieces. Call it again after an interruption: only the missing
        bytes are fetched. `on_progress(done, total)`: bytes of all files, from any thread, one call at a time.
        """
        found = self.retrieve(checkpoint)
        fetch(self._transport, found.id, _files(found, folder, on_progress))
        return Path(folder)


class AsyncCheckpoints:
    def __init__(self, transport: AsyncTransport) -> None:
        self._transport = transport

    def list(self, *, job: Job | str | None = None, limit: int | None = None) -> AsyncPages[Checkpoint]:
        """Checkpoints of a job, or of all, oldest first."""
        return AsyncPages(self._transport.send, _calls.list_checkpoints(job, limit))

    async def retrieve(self, checkpoint: Checkpoint | str) -> Checkpoint:
        return await self._transport.send(_calls.retrieve_checkpoint(checkpoint))

    async def best(self, job: Job | str) -> Checkpoint:
        """The one that evaluated best so far: by validation loss, or by held-out reward (RL).

        Raises `FineryError` if the job has none.
        """
        return await self.retrieve(_best_of(await self._transport.send(_calls.retrieve_job(job))))

    async def delete(self, checkpoint: Checkpoint | str) -> None:
        """Delete it for good. `ConflictError` while a job needs it."""
        await self._transport.send(_calls.delete_checkpoint(checkpoint))

    async def download(
        self, checkpoint: Checkpoint | str, folder: str | os.PathLike[str], *, on_progress: Progress | None = None
    ) -> Path:
        """Fetch all files into `folder` and return it. Every file has its sha256 proved before it gets its name.

        Four connections at a time, big files in several pieces. Call it again after an interruption: only the missing
        bytes are fetched. `on_progress(done, total)`: bytes of all files.
        """
        found = await self.retrieve(checkpoint)
        await fetch_async(self._transport, found.id, _files(found, folder, on_progress))
        return Path(folder)


def _files(found: Checkpoint, folder: str | os.PathLike[str], on_progress: Progress | None) -> list[Partial]:
    return partials(found, Path(folder), Meter(sum(file.bytes for file in found.files), on_progress))


def _best_of(job: Job) -> str:
    if job.best_checkpoint is None:
        held_out = job.hyperparameters.get("eval_prompts") if job.method == "rl" else job.validation_file
        missing = "it holds no eval_prompts out" if job.method == "rl" else "it has no validation file"
        why = f"none was evaluated yet ({job.state!s})" if held_out else missing
        raise FineryError(f"Job {job.id} has no best checkpoint: {why}. See checkpoints.list(job={job.id!r}).")
    return job.best_checkpoint
