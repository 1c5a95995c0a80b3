"""Column helpers that every noun's tables share. The migrations are the schema; a test compares the two."""

from __future__ import annotations

from typing import Any

from sqlalchemy import DateTime
from sqlalchemy.dialects.postgresql import JSONB
from sqlmodel import Field


def json_field(**kwargs: Any) -> Any:
    """None is SQL's NULL, so that checks on `is null` see it, not JSON's."""
    return Field(sa_type=JSONB(none_as_null=True), **kwargs)


def time_field(**kwargs: Any) -> Any:
    return Field(sa_type=DateTime(timezone=True), **kwargs)
