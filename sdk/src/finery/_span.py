"""A stretch of a file that one fetch at a time fills from its start. It neither sends nor sleeps."""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import TYPE_CHECKING

from finery.errors import APIConnectionError, APIError, DownloadError

if TYPE_CHECKING:
    from finery._download import Partial

_RANGE = re.compile(r"bytes (\d+)-\d+/(?:\d+|\*)")


class Spoilt(Exception):  # noqa: N818 (caught inside, never seen by a customer)
    """The answer that is being read is of no use any more."""


class Span:
    """[start, end) of a file, of which the first `done` bytes are there. `only`: it is the whole file.

    While `wanted`, fetch from `offset` up to `limit`: `begin`, `write`…, `end`; `failed` after an error.
    """

    def __init__(self, partial: Partial, index: int, start: int, end: int, *, only: bool) -> None:
        self.partial = partial
        self.index = index
        self.start = start
        self.size = end - start
        self.done = 0
        self._only = only
        self._done_before = 0
        self._failures = 0

    @property
    def offset(self) -> int:
        return self.start + self.done

    @property
    def limit(self) -> int | None:
        """None: up to the end of the file, whatever it is."""
        return None if self._only else self.start + self.size

    def wanted(self) -> bool:
        return self.done < self.size and self.partial.spoilt is None and not self.partial.meter.stopped

    def begin(self, status: int, headers: Mapping[str, str]) -> None:
        """Before the first byte of an answer: a server may send what was asked for (206) or all (200)."""
        self._done_before = self.done
        path = self.partial.file.path
        if status == 206:
            found = _RANGE.fullmatch(headers.get("content-range", ""))
            if found is None or int(found[1]) != self.offset:
                raise DownloadError(
                    f"{path}: expected bytes from {self.offset}, found {headers.get('content-range')!r}"
                )
        elif not self._only:
            self.partial.spoilt = "ranges"
            raise Spoilt
        elif self.done:
            self.partial.rewind(self)

    def write(self, chunk: bytes) -> None:
        if self.done + len(chunk) > self.size:
            more = self.partial.file.bytes if self._only else self.size
            self.partial.discard(f"the server sent more than its {more} bytes")
        self.partial.write(self, chunk)

    def end(self) -> None:
        """After the last byte of an answer."""
        if self.done < self.size:
            file = self.partial.file
            message = f"{file.path}: the answer ended after {self.offset} of {file.bytes} bytes"
            raise APIConnectionError(message, code="connection_error")

    def failed(self, error: APIError) -> int:
        """How many fetches in a row have now brought nothing. 416 means that the partial is not the server's file."""
        if error.status == 416 and self.partial.resumed:
            self.partial.spoilt = "stale"
            return 0
        self._failures = 1 if self.done > self._done_before else self._failures + 1
        self._done_before = self.done
        return self._failures
