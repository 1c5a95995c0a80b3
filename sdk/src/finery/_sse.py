"""Server-sent events, parsed from bytes as they come (WHATWG HTML, "Server-sent events"). Pure."""

from __future__ import annotations

import re
from dataclasses import dataclass

# Only these end a line. str.splitlines would also cut at U+2028, U+0085 and others, which JSON may hold.
_LINE_END = re.compile(rb"\r\n|\r|\n")
_BOM = b"\xef\xbb\xbf"


@dataclass(frozen=True)
class ServerEvent:
    type: str
    data: str
    id: str


class SseParser:
    """Feed it chunks cut anywhere, even inside a character or a CRLF."""

    def __init__(self) -> None:
        self._line = bytearray()
        self._after_cr = False
        self._first_line = True
        self._type = ""
        self._data: list[str] = []
        self._id = ""

    def feed(self, chunk: bytes) -> list[ServerEvent]:
        """The events that `chunk` completes. What the stream's end leaves unfinished is dropped, as the norm says."""
        if self._after_cr and chunk.startswith(b"\n"):
            chunk = chunk[1:]
            self._after_cr = False
        if not chunk:
            return []
        self._after_cr = chunk.endswith(b"\r")
        *lines, rest = _LINE_END.split(chunk)
        if lines:
            lines[0] = bytes(self._line) + lines[0]
            self._line.clear()
        self._line += rest
        events = (self._take(line) for line in lines)
        return [event for event in events if event is not None]

    def _take(self, line: bytes) -> ServerEvent | None:
        if self._first_line:
            self._first_line = False
            line = line.removeprefix(_BOM)
        if not line:
            return self._dispatch()
        name, _, value = line.decode("utf-8", "replace").partition(":")
        value = value.removeprefix(" ")
        if name == "data":
            self._data.append(value)
        elif name == "event":
            self._type = value
        elif name == "id" and "\0" not in value:
            self._id = value
        return None  # a comment has the empty name; `retry` and unknown fields are not ours

    def _dispatch(self) -> ServerEvent | None:
        event = ServerEvent(self._type or "message", "\n".join(self._data), self._id) if self._data else None
        self._type, self._data = "", []
        return event
