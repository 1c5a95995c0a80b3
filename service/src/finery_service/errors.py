"""The one exception that a door turns into an error body."""

from __future__ import annotations

from typing import Any

from finery.types.errors import ErrorDetail

_TYPES = {
    400: "invalid_request_error",
    401: "authentication_error",
    403: "permission_error",
    404: "not_found_error",
    405: "invalid_request_error",
    409: "conflict_error",
    413: "invalid_request_error",
    415: "invalid_request_error",
    416: "invalid_request_error",
    422: "invalid_request_error",
    429: "rate_limit_error",
}


class ServiceError(Exception):
    """Raised anywhere below the routes; `message` says what was expected, what was found, what to do."""

    def __init__(
        self,
        status: int,
        code: str,
        message: str,
        *,
        param: str | None = None,
        details: list[dict[str, Any]] | None = None,
        headers: dict[str, str] | None = None,
    ) -> None:
        super().__init__(message)
        self.status = status
        self.headers = headers or {}
        self.detail = ErrorDetail(
            message=message, type=_TYPES.get(status, "server_error"), code=code, param=param, details=details
        )


def not_found(noun: str, id_: str, param: str | None = None) -> ServiceError:
    """The same answer for an unknown id and for another tenant's."""
    return ServiceError(404, f"{noun}_not_found", f"No {noun} with the id {id_[:80]!r} exists.", param=param)


def refusal(code: str, param: str, expected: str, found: object) -> ServiceError:
    """400: a field of the request that cannot be had."""
    message = f"{param}: expected {expected}, found {str(found)[:80]}."
    return ServiceError(400, code, message, param=param)
