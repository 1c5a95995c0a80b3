"""multipart/form-data as a stream of parts: nothing is buffered whole, every part has a limit.

Starlette's own form parser spools files to disk before the route runs and takes a file part without a name for text.
"""

from __future__ import annotations

import re
from collections import deque
from collections.abc import AsyncIterator, Callable
from dataclasses import dataclass
from typing import TYPE_CHECKING
from urllib.parse import unquote_to_bytes

from python_multipart.exceptions import FormParserError
from python_multipart.multipart import MultipartParser, parse_options_header

from finery.data.strict_json import printable
from finery_service.errors import ServiceError

MAX_PARTS = 16
_MAX_HEADER_BYTES = 4096

_PARAMETER = re.compile(rb';\s*([!#$%&\'*+.^_`|~0-9A-Za-z-]+)\s*=\s*("(?:[^"\\]|\\.)*"|[^;\s"]*)')
# What HTML, and so every browser and httpx, writes instead of these three.
_ESCAPES = {"%22": '"', "%0D": "\r", "%0A": "\n"}


if TYPE_CHECKING:
    from python_multipart.multipart import MultipartCallbacks


@dataclass(frozen=True)
class Part:
    name: str
    filename: str | None
    """As sent; None if the part has none."""


class Multipart:
    """The parts of a body, in order. Read each to its end (`data`, `text`, `skip`) before asking for the next.

    Raises 400 for a body that is not multipart or has too many parts.
    """

    def __init__(self, content_type: str, chunks: AsyncIterator[bytes]) -> None:
        kind, options = parse_options_header(content_type)
        boundary = options.get(b"boundary")
        if kind != b"multipart/form-data" or not boundary:
            message = f"Expected multipart/form-data with a boundary, found {printable(content_type)!r}."
            raise ServiceError(400, "invalid_multipart", message, param="content-type")
        self._chunks = chunks
        self._events: deque[tuple[str, bytes]] = deque()
        self._is_complete = False
        self._parts = 0
        callbacks: MultipartCallbacks = {
            "on_header_field": self._piece("field"),
            "on_header_value": self._piece("value"),
            "on_header_end": lambda: self._events.append(("header", b"")),
            "on_headers_finished": lambda: self._events.append(("headers", b"")),
            "on_part_data": self._piece("data"),
            "on_part_end": lambda: self._events.append(("end", b"")),
            "on_end": self._complete,
        }
        try:
            self._parser = MultipartParser(boundary, callbacks, max_header_size=_MAX_HEADER_BYTES)
        except FormParserError as error:
            raise _malformed(error) from None

    async def parts(self) -> AsyncIterator[Part]:
        while (part := await self._next_part()) is not None:
            self._parts += 1
            if self._parts > MAX_PARTS:
                message = f"Expected at most {MAX_PARTS} parts, found more."
                raise ServiceError(400, "too_many_parts", message)
            yield part

    async def data(self) -> AsyncIterator[bytes]:
        """The current part's bytes as they come in."""
        while (event := await self._event()) is not None and event[0] != "end":
            yield event[1]

    async def text(self, part: Part, limit: int) -> str:
        """The current part as text of at most `limit` bytes. Raises 413, or 400 if it is not UTF-8."""
        value = bytearray()
        async for piece in self.data():
            value += piece
            if len(value) > limit:
                message = f"Expected at most {limit} bytes in the field {printable(part.name)}, found more."
                raise ServiceError(413, "field_too_large", message, param=printable(part.name))
        try:
            return value.decode()
        except UnicodeDecodeError:
            message = f"Expected UTF-8 in the field {printable(part.name)}, found other bytes."
            raise ServiceError(400, "invalid_utf8", message, param=printable(part.name)) from None

    async def _next_part(self) -> Part | None:
        headers: dict[bytes, bytes] = {}
        field, value = b"", b""
        while True:
            event = await self._event(at_end_is_fine=True)
            if event is None:
                return None
            kind, piece = event
            if kind == "field":
                field += piece
            elif kind == "value":
                value += piece
            elif kind == "header":
                headers[field.lower()] = value
                field, value = b"", b""
            elif kind == "headers":
                return _part(headers)

    async def _event(self, *, at_end_is_fine: bool = False) -> tuple[str, bytes] | None:
        while not self._events:
            if self._is_complete:
                if at_end_is_fine:
                    return None
                raise _malformed("it ends inside a part")
            chunk = await anext(self._chunks, None)
            if chunk is None:
                raise _malformed("the closing boundary is missing")
            try:
                self._parser.write(chunk)
            except FormParserError as error:
                raise _malformed(error) from None
        return self._events.popleft()

    def _piece(self, kind: str) -> Callable[[bytes, int, int], None]:
        def keep(data: bytes, start: int, end: int) -> None:
            self._events.append((kind, bytes(data[start:end])))

        return keep

    def _complete(self) -> None:
        self._is_complete = True


def _part(headers: dict[bytes, bytes]) -> Part:
    disposition = headers.get(b"content-disposition", b"")
    given = {name.lower(): value for name, value in _PARAMETER.findall(disposition)}
    if not disposition.lower().lstrip().startswith(b"form-data") or b"name" not in given:
        raise _malformed("a part has no Content-Disposition with a name")
    filename = _unquoted(given[b"filename"]) if b"filename" in given else None
    if b"filename*" in given:
        filename = _extended(given[b"filename*"])
    return Part(_unquoted(given[b"name"]), filename)


def _unquoted(value: bytes) -> str:
    if value.startswith(b'"'):
        value = re.sub(rb'\\(["\\])', rb"\1", value[1:-1])  # browsers leave other backslashes alone
    text = _decoded(value)
    return re.sub("%22|%0D|%0A", lambda match: _ESCAPES[match[0]], text)


def _extended(value: bytes) -> str:
    """RFC 5987: UTF-8'language'percent-encoded."""
    charset, _, rest = value.partition(b"'")
    if charset.lower() != b"utf-8":
        raise _malformed("filename* has another charset than UTF-8")
    return _decoded(unquote_to_bytes(rest.partition(b"'")[2]))


def _decoded(value: bytes) -> str:
    try:
        return value.decode()
    except UnicodeDecodeError:
        raise _malformed("a name is not UTF-8") from None


def _malformed(why: object) -> ServiceError:
    return ServiceError(
        400, "invalid_multipart", f"Expected a well-formed multipart body, but {printable(str(why), 200)}."
    )
