"""Uploaded data sets."""

from __future__ import annotations

from finery import _calls
from finery._multipart import Source, open_upload
from finery._paging import AsyncPages, Pages
from finery._transport import AsyncTransport, Progress, SyncTransport
from finery.types.files import File


class Files:
    def __init__(self, transport: SyncTransport) -> None:
        self._transport = transport

    def upload(self, file: Source, *, name: str | None = None, on_progress: Progress | None = None) -> File:
        """Send a data set: a path, bytes, or a file opened in binary mode. It is read as it goes out.

        A file with bad rows is stored too: look at `status`, `errors` (line, path, message, hint) and `error_count`.
        `on_progress(sent, total)`: bytes of the file; starts over if the call is retried.
        """
        with open_upload(file, name) as upload:
            call = _calls.upload_file(upload, self._transport.config.runtime.new_key())
            return self._transport.send(call, on_progress)

    def list(self, *, limit: int | None = None) -> Pages[File]:
        """All files, newest first, fetched `limit` (≤ 100) at a time."""
        return Pages(self._transport.send, _calls.list_files(limit))

    def retrieve(self, file: File | str) -> File:
        return self._transport.send(_calls.retrieve_file(file))


class AsyncFiles:
    def __init__(self, transport: AsyncTransport) -> None:
        self._transport = transport

    async def upload(self, file: Source, *, name: str | None = None, on_progress: Progress | None = None) -> File:
        """Send a data set: a path, bytes, or a file opened in binary mode. It is read as it goes out.

        A file with bad rows is stored too: look at `status`, `errors` (line, path, message, hint) and `error_count`.
        `on_progress(sent, total)`: bytes of the file; starts over if the call is retried.
        """
        with open_upload(file, name) as upload:
            call = _calls.upload_file(upload, self._transport.config.runtime.new_key())
            return await self._transport.send(call, on_progress)

    def list(self, *, limit: int | None = None) -> AsyncPages[File]:
        """All files, newest first, fetched `limit` (≤ 100) at a time."""
        return AsyncPages(self._transport.send, _calls.list_files(limit))

    async def retrieve(self, file: File | str) -> File:
        return await self._transport.send(_calls.retrieve_file(file))
