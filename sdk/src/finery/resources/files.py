"""Uploaded data sets."""

from __future__ import annotations

from collections.abc import Sequence

from finery import _calls
from finery._multipart import Source, open_upload
from finery._paging import AsyncPages, Pages
from finery._poll import Poll, ready
from finery._transport import AsyncTransport, Progress, SyncTransport
from finery.types.files import File
from finery.types.methods import TrainOn, Truncation
from finery.types.models import Model
from finery.types.previews import Preview


class Files:
    def __init__(self, transport: SyncTransport) -> None:
        self._transport = transport

    def upload(
        self,
        file: Source,
        *,
        name: str | None = None,
        project: str | None = None,
        on_progress: Progress | None = None,
    ) -> File:
        """Send a data set: a path, bytes, or a file opened in binary mode. It is read as it goes out.

        A file with bad rows is stored too: look at `status`, `errors` (line, path, message, hint) and `error_count`.
        `project`: its id; by default that of the key. `on_progress(sent, total)`: bytes of the file; starts over if
        the call is retried.
        """
        with open_upload(file, name) as upload:
            call = _calls.upload_file(upload, project, self._transport.config.runtime.new_key())
            return self._transport.send(call, on_progress)

    def list(self, *, project: str | None = None, limit: int | None = None) -> Pages[File]:
        """All files, or those of a project, newest first, fetched `limit` (≤ 100) at a time."""
        return Pages(self._transport.send, _calls.list_files(project, limit))

    def retrieve(self, file: File | str) -> File:
        return self._transport.send(_calls.retrieve_file(file))

    def delete(self, file: File | str) -> None:
        """Delete it for good. `ConflictError` while a job needs it."""
        self._transport.send(_calls.delete_file(file))

    def preview(
        self,
        file: File | str,
        *,
        model: Model | str,
        train_on: TrainOn | None = None,
        max_length: int | None = None,
        truncation: Truncation | None = None,
        added_tokens: Sequence[str] | None = None,
        first_line: int | None = None,
        rows: int | None = None,
        timeout: float = 300.0,
    ) -> Preview:
        """Render rows as `model` would be trained on them: print the answer, or show it in a notebook.

        What is None has the server's default; the fields are those of `finery.types.previews.PreviewCreate`. Raises
        `PreviewFailedError` (with `.preview`), `WaitTimeoutError` after `timeout` seconds.
        """
        cut = {"max_length": max_length, "truncation": truncation, "first_line": first_line, "rows": rows}
        fields = {"model": model, "train_on": train_on, "added_tokens": added_tokens, **cut}
        config = self._transport.config
        found = self._transport.send(_calls.create_preview(file, fields, config.runtime.new_key()))
        poll = Poll(config, timeout)
        while not ready(found):
            config.runtime.sleep(poll.pause(found))
            found = self._transport.send(_calls.retrieve_preview(found))
        return found


class AsyncFiles:
    def __init__(self, transport: AsyncTransport) -> None:
        self._transport = transport

    async def upload(
        self,
        file: Source,
        *,
        name: str | None = None,
        project: str | None = None,
        on_progress: Progress | None = None,
    ) -> File:
        """Send a data set: a path, bytes, or a file opened in binary mode. It is read as it goes out.

        A file with bad rows is stored too: look at `status`, `errors` (line, path, message, hint) and `error_count`.
        `project`: its id; by default that of the key. `on_progress(sent, total)`: bytes of the file; starts over if
        the call is retried.
        """
        with open_upload(file, name) as upload:
            call = _calls.upload_file(upload, project, self._transport.config.runtime.new_key())
            return await self._transport.send(call, on_progress)

    def list(self, *, project: str | None = None, limit: int | None = None) -> AsyncPages[File]:
        """All files, or those of a project, newest first, fetched `limit` (≤ 100) at a time."""
        return AsyncPages(self._transport.send, _calls.list_files(project, limit))

    async def retrieve(self, file: File | str) -> File:
        return await self._transport.send(_calls.retrieve_file(file))

    async def delete(self, file: File | str) -> None:
        """Delete it for good. `ConflictError` while a job needs it."""
        await self._transport.send(_calls.delete_file(file))

    async def preview(
        self,
        file: File | str,
        *,
        model: Model | str,
        train_on: TrainOn | None = None,
        max_length: int | None = None,
        truncation: Truncation | None = None,
        added_tokens: Sequence[str] | None = None,
        first_line: int | None = None,
        rows: int | None = None,
        timeout: float = 300.0,  # noqa: ASYNC109 (the same signature as the sync one)
    ) -> Preview:
        """Render rows as `model` would be trained on them: print the answer, or show it in a notebook.

        What is None has the server's default; the fields are those of `finery.types.previews.PreviewCreate`. Raises
        `PreviewFailedError` (with `.preview`), `WaitTimeoutError` after `timeout` seconds.
        """
        cut = {"max_length": max_length, "truncation": truncation, "first_line": first_line, "rows": rows}
        fields = {"model": model, "train_on": train_on, "added_tokens": added_tokens, **cut}
        config = self._transport.config
        found = await self._transport.send(_calls.create_preview(file, fields, config.runtime.new_key()))
        poll = Poll(config, timeout)
        while not ready(found):
            await config.runtime.sleep_async(poll.pause(found))
            found = await self._transport.send(_calls.retrieve_preview(found))
        return found
