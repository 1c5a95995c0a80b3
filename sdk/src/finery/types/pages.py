"""Lists, and what is left of a deleted object."""

from __future__ import annotations

from typing import Generic, Literal, TypeVar

from finery.types.base import Resource

T = TypeVar("T")


class Page(Resource, Generic[T]):
    """`{"object": "list", "data": […], "has_more", "last_id"}`; go on with `after=last_id`."""

    object: Literal["list"] = "list"
    data: tuple[T, ...]
    has_more: bool = False
    last_id: str | None = None


class Deleted(Resource):
    """The answer to a DELETE: the id answers 404 from now on."""

    object: str
    """What it was, as in `checkpoint`."""
    id: str
    deleted: Literal[True] = True
