"""Time comes from a clock that is passed in; leases use the database's own."""

from __future__ import annotations

from collections.abc import Callable
from datetime import UTC, datetime

Clock = Callable[[], datetime]
"""Aware UTC now."""


def system_clock() -> datetime:
    return datetime.now(UTC)


def milliseconds(now: datetime) -> int:
    return int(now.timestamp() * 1000)
