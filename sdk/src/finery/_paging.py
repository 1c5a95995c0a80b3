"""Lists that fetch their next page when it is needed."""

from __future__ import annotations

from collections.abc import AsyncIterator, Awaitable, Callable, Iterator
from typing import Generic, TypeVar

from finery._call import Call
from finery.errors import APIError
from finery.types.pages import Page

T = TypeVar("T")


class Pages(Generic[T]):
    """Iterate it for every item of all pages. Nothing is sent before the first item is asked for."""

    def __init__(self, send: Callable[[Call[Page[T]]], Page[T]], first: Call[Page[T]]) -> None:
        self._send = send
        self._first = first

    def __repr__(self) -> str:
        return f"<{self._first.path}: iterate over it, or list() it>"

    def __iter__(self) -> Iterator[T]:
        for page in self.pages():
            yield from page.data

    def pages(self) -> Iterator[Page[T]]:
        call: Call[Page[T]] | None = self._first
        while call is not None:
            page = self._send(call)
            yield page
            call = following(call, page)


class AsyncPages(Generic[T]):
    """`async for` it for every item of all pages. Nothing is sent before the first item is asked for."""

    def __init__(self, send: Callable[[Call[Page[T]]], Awaitable[Page[T]]], first: Call[Page[T]]) -> None:
        self._send = send
        self._first = first

    def __repr__(self) -> str:
        return f"<{self._first.path}: iterate over it with async for>"

    async def __aiter__(self) -> AsyncIterator[T]:
        async for page in self.pages():
            for item in page.data:
                yield item

    async def pages(self) -> AsyncIterator[Page[T]]:
        call: Call[Page[T]] | None = self._first
        while call is not None:
            page = await self._send(call)
            yield page
            call = following(call, page)


def following(call: Call[Page[T]], page: Page[T]) -> Call[Page[T]] | None:
    """The call for the page after `page`; None at the end."""
    if not page.has_more:
        return None
    if page.last_id is None or ("after", page.last_id) in call.params:
        message = f"{call.path}: expected has_more to come with a new last_id, found {page.last_id!r} again"
        raise APIError(message, code="unexpected_response")
    return call.with_params(after=page.last_id)
