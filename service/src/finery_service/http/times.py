"""Times in query parameters: RFC 3339 with a zone, nothing else."""

from __future__ import annotations

import re
from datetime import UTC, datetime

from finery.data.strict_json import shown
from finery_service.errors import ServiceError

_RFC3339 = re.compile(r"\d{4}-\d\d-\d\d[Tt ]\d\d:\d\d:\d\d(\.\d{1,9})?([Zz]|[+-]\d\d:\d\d)", re.ASCII)


def aware(param: str, text: str | None) -> datetime | None:
    """`text` in UTC. Raises 400 for what is no time, and for a time without a zone: nobody knows which one it is."""
    if text is None:
        return None
    try:
        time = datetime.fromisoformat(text.upper()) if _RFC3339.fullmatch(text) else None
    except ValueError:
        time = None
    if time is None:
        message = (
            f"{param}: expected an RFC 3339 time with a zone (Z, or an offset with + as %2B), found {shown(text)}."
        )
        raise ServiceError(400, "invalid_time", message, param=param)
    try:
        return time.astimezone(UTC)
    except OverflowError:
        message = f"{param}: expected a time between the years 1 and 9999."
        raise ServiceError(400, "invalid_time", message, param=param) from None
