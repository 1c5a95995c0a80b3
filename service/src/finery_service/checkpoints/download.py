"""One file of a checkpoint over HTTP: whole, or a range of it (RFC 9110), never buffered."""

from __future__ import annotations

import base64
import re
from collections.abc import AsyncIterator
from dataclasses import dataclass
from urllib.parse import quote

import obstore
from fastapi import Request, Response
from fastapi.responses import StreamingResponse
from obstore.store import ObjectStore

from finery.types.checkpoints import CheckpointFile
from finery_service.errors import ServiceError

_CHUNK = 2**20
_RANGE = re.compile(r"bytes=(?:(\d{1,19})-(\d{0,19})|-(\d{1,19}))")
_UNSAFE = re.compile(r'[^A-Za-z0-9._ -]|"')


@dataclass(frozen=True)
class Span:
    """Bytes [start, end)."""

    start: int
    end: int


async def download(store: ObjectStore, key: str, file: CheckpointFile, request: Request) -> Response:
    """200, 206, 304, or an error before the first byte."""
    etag = f'"{file.sha256}"'
    headers = {
        "etag": etag,
        "accept-ranges": "bytes",
        "x-checksum-sha256": file.sha256,
        "repr-digest": f"sha-256=:{base64.b64encode(bytes.fromhex(file.sha256)).decode()}:",
        "content-disposition": disposition(file.path.rsplit("/", 1)[-1]),
        "cache-control": "private, immutable, max-age=31536000",
        "x-content-type-options": "nosniff",
    }
    if request.headers.get("if-none-match") in (etag, "*"):
        return Response(status_code=304, headers=headers)
    span = None
    if request.headers.get("if-range", etag) == etag:
        span = span_of(request.headers.get("range"), file.bytes)
    status, whole = (200, Span(0, file.bytes)) if span is None else (206, span)
    if span is not None:
        headers["content-range"] = f"bytes {span.start}-{span.end - 1}/{file.bytes}"
    headers["content-length"] = str(whole.end - whole.start)
    body = await _open(store, key, whole) if whole.end > whole.start else _nothing()
    return StreamingResponse(body, status, headers, media_type="application/octet-stream")


def span_of(header: str | None, size: int) -> Span | None:
    """The bytes asked for; None for the whole file, also where a header asks for what we need not understand.

    Raises 416 for a range outside the file.
    """
    match = _RANGE.fullmatch(header.strip().lower().replace(" ", "")) if header else None
    if match is None:
        return None
    first, last, suffix = match.groups()
    if suffix is not None:
        span = Span(max(size - int(suffix), 0), size)
    else:
        span = Span(int(first), min(int(last) + 1, size) if last else size)
        if last and int(last) < int(first):
            return None  # not a range at all: to be ignored
    if span.start >= size or span.start >= span.end:
        message = f"Expected a range that begins before byte {size}, found {match[0]}."
        raise ServiceError(
            416, "range_not_satisfiable", message, param="range", headers={"content-range": f"bytes */{size}"}
        )
    return span


def disposition(name: str) -> str:
    """`name` for a download: an ASCII stand-in, and the name itself for who understands RFC 6266."""
    return f"attachment; filename=\"{_UNSAFE.sub('_', name)}\"; filename*=UTF-8''{quote(name, safe='')}"


async def _open(store: ObjectStore, key: str, span: Span) -> AsyncIterator[bytes]:
    """Fails here, before the headers are out, if the object is not there."""
    result = await obstore.get_async(store, key, options={"range": (span.start, span.end)})
    return _pieces(result)


async def _pieces(result: obstore.GetResult) -> AsyncIterator[bytes]:
    async for piece in result.stream(min_chunk_size=_CHUNK):
        yield bytes(piece)


async def _nothing() -> AsyncIterator[bytes]:
    pieces: tuple[bytes, ...] = ()
    for piece in pieces:
        yield piece
