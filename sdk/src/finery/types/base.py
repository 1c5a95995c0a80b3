"""The kinds of class in the vocabulary: requests are strict, resources are plain, some know their client."""

from __future__ import annotations

import unicodedata
from datetime import UTC, datetime
from typing import Annotated, Any, Self

from pydantic import AfterValidator, BaseModel, ConfigDict, PlainSerializer, PrivateAttr, StringConstraints


def _aware_utc(value: datetime) -> datetime:
    if value.tzinfo is None:
        raise ValueError("expected a time with a zone, found a naive one; add a UTC offset or Z")
    return value.astimezone(UTC)


def _rfc3339(value: datetime) -> str:
    return value.isoformat(timespec="microseconds").replace("+00:00", "Z")


Time = Annotated[datetime, AfterValidator(_aware_utc), PlainSerializer(_rfc3339, when_used="json")]
"""An aware UTC time, RFC 3339 with Z on the wire."""


def _one_line(value: str) -> str:
    """Names are printed in tables and terminals: a line feed or an escape sequence in one would break them."""
    if not value.strip():
        raise ValueError("expected a name, found only spaces")
    if any(unicodedata.category(character) in ("Cc", "Zl", "Zp") for character in value):
        raise ValueError("expected a name without control characters, found one with some")
    return value


Name = Annotated[str, StringConstraints(min_length=1, max_length=128), AfterValidator(_one_line)]
"""What somebody calls a job, a tenant, a key: one line, kept exactly as sent."""


class Request(BaseModel):
    """What a client sends: unknown fields, wrong types, NaN and infinity are refused."""

    model_config = ConfigDict(extra="forbid", strict=True, frozen=True, allow_inf_nan=False)


class Resource(BaseModel):
    """What the server answers. Clients tolerate new fields (they are kept in `model_extra`)."""

    model_config = ConfigDict(extra="allow", frozen=True, protected_namespaces=())


class Link:
    """The client that a resource came through. It makes no difference to equality, and stays behind in a pickle."""

    __slots__ = ("client",)

    def __init__(self, client: Any = None) -> None:
        self.client = client

    def __eq__(self, other: object) -> bool:
        return isinstance(other, Link)

    def __hash__(self) -> int:
        return 0

    def __copy__(self) -> Self:
        return self

    def __deepcopy__(self, memo: dict[int, Any]) -> Self:
        return self

    def __reduce__(self) -> tuple[type[Link], tuple[()]]:
        return (Link, ())


class Linked(Resource):
    """A resource with verbs: they are the calls of the client that it came through.

    From a `Finery` they answer as its methods do, from an `AsyncFinery` with what is to be awaited or iterated.
    """

    _link: Link = PrivateAttr(default_factory=Link)

    def _client(self) -> Any:
        if self._link.client is None:
            kind = type(self).__name__
            raise RuntimeError(
                f"This {kind} did not come from a client (it was made by hand, or pickled), so it cannot make calls. "
                f"Fetch it: client.{kind.lower()}s.retrieve(…)."
            )
        return self._link.client


def link(answer: object, client: Any) -> None:
    """Tell a resource, or all of a page, which client it came through."""
    for item in getattr(answer, "data", ()) if not isinstance(answer, Linked) else (answer,):
        if isinstance(item, Linked):
            item._link = Link(client)
