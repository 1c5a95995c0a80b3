"""The error body that every door of the service answers with."""

from __future__ import annotations

from typing import Any, Literal

from pydantic import BaseModel, ConfigDict

ErrorType = Literal[
    "invalid_request_error",
    "authentication_error",
    "permission_error",
    "not_found_error",
    "conflict_error",
    "rate_limit_error",
    "server_error",
]


class Problem(BaseModel):
    """One thing wrong with a data file: where, what, and what to do."""

    model_config = ConfigDict(extra="ignore", frozen=True)

    line: int | None = None
    """1-based line of the file; None when the whole file is meant."""
    offset: int | None = None
    """0-based byte of the file at which the line begins."""
    path: str = ""
    """Place inside the row, as in `messages[1].content`."""
    code: str
    message: str
    hint: str = ""


class ErrorDetail(BaseModel):
    model_config = ConfigDict(extra="ignore", frozen=True)

    message: str
    """What was expected, what was found, what to do."""
    type: ErrorType | str
    code: str
    param: str | None = None
    """The field that is wrong, as in `hyperparameters.learning_rate`."""
    details: list[dict[str, Any]] | None = None


class ErrorBody(BaseModel):
    """`{"error": {"message", "type", "code", "param", "details"?}}`"""

    model_config = ConfigDict(extra="ignore", frozen=True)

    error: ErrorDetail
