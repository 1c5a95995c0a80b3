"""Lists."""

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
