"""Lines of an object in the store, a page at a time: never the whole object, however long it is."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import AsyncGenerator
from dataclasses import dataclass, field

import obstore
from obstore.store import ObjectStore

MAX_LINE_BYTES = 64 * 2**20
_CHUNK = 2**20
_REMEMBERED = 4096


@dataclass
class Offsets:
    """Where lines begin, of pages that were read: the next page begins there, and what lies before is not read again.

    Of one process; the objects never change.
    """

    known: OrderedDict[tuple[str, int], int] = field(default_factory=OrderedDict)

    def keep(self, key: str, line: int, offset: int) -> None:
        self.known[key, line] = offset
        if len(self.known) > _REMEMBERED:
            self.known.popitem(last=False)

    def begin(self, key: str, line: int) -> tuple[int, int]:
        """(line, offset) to read from: the very line, or the first."""
        offset = self.known.get((key, line))
        return (0, 0) if offset is None else (line, offset)


@dataclass(frozen=True)
class Line:
    number: int
    """From 0."""
    content: bytes
    """Without its end."""
    end: int
    """Offset of the next line."""


async def lines(store: ObjectStore, key: str, size: int, first: int, offsets: Offsets) -> AsyncGenerator[Line]:
    """The lines of the object `key` from number `first` on. `size` is its length in bytes.

    Raises FileNotFoundError for an object that is not there, ValueError for a line beyond `MAX_LINE_BYTES`.
    """
    number, offset = offsets.begin(key, first)
    if offset >= size:
        return
    result = await obstore.get_async(store, key, options={"range": (offset, size)})
    rest = b""
    async for piece in result.stream(min_chunk_size=_CHUNK):
        *whole, rest = (rest + bytes(piece)).split(b"\n")
        if len(rest) > MAX_LINE_BYTES:
            raise ValueError(f"expected lines of at most {MAX_LINE_BYTES} bytes in {key}, found line {number} longer")
        for content in whole:
            offset += len(content) + 1
            if number >= first:
                yield Line(number, content, offset)
            number += 1
    if rest:
        yield Line(number, rest, offset + len(rest))
