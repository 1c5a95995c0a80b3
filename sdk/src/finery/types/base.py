"""The two kinds of class in the vocabulary: requests are strict, resources are plain."""

from __future__ import annotations

from datetime import UTC, datetime
from typing import Annotated

from pydantic import AfterValidator, BaseModel, ConfigDict, PlainSerializer


def _aware_utc(value: datetime) -> datetime:
    if value.tzinfo is None:
        raise ValueError("expected a time with a zone, found a naive one; add a UTC offset or Z")
    return value.astimezone(UTC)


def _rfc3339(value: datetime) -> str:
    return value.isoformat(timespec="microseconds").replace("+00:00", "Z")


Time = Annotated[datetime, AfterValidator(_aware_utc), PlainSerializer(_rfc3339, when_used="json")]
"""An aware UTC time, RFC 3339 with Z on the wire."""


class Request(BaseModel):
    """What a client sends: unknown fields, wrong types, NaN and infinity are refused."""

    model_config = ConfigDict(extra="forbid", strict=True, frozen=True, allow_inf_nan=False)


class Resource(BaseModel):
    """What the server answers. Clients tolerate new fields (they are kept in `model_extra`)."""

    model_config = ConfigDict(extra="allow", frozen=True, protected_namespaces=())
