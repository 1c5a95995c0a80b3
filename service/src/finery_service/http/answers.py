"""Answers and error bodies: strict JSON, one shape for every error, FastAPI's own included."""

from __future__ import annotations

from typing import Any

from fastapi import FastAPI, Request, Response
from fastapi.exceptions import RequestValidationError
from sqlalchemy.exc import DBAPIError, InterfaceError, OperationalError
from sqlalchemy.exc import TimeoutError as PoolTimeoutError
from starlette.exceptions import HTTPException

from finery.types.base import Resource
from finery.types.errors import ErrorBody
from finery_service.errors import ServiceError
from finery_service.http.bodies import found


def answer(resource: Resource, status: int = 200, headers: dict[str, str] | None = None) -> Response:
    """`resource` as strict JSON: what is not finite becomes null."""
    return Response(resource.model_dump_json(), status, headers, media_type="application/json")


def error_response(error: ServiceError) -> Response:
    unused = None if error.detail.details else {"error": {"details"}}
    body = ErrorBody(error=error.detail).model_dump_json(exclude=unused)
    return Response(body, error.status, error.headers, media_type="application/json")


def internal_error() -> ServiceError:
    message = "Something went wrong on our side; try again, and give us the x-request-id of this answer if it stays."
    return ServiceError(500, "internal_error", message)


def install_handlers(app: FastAPI) -> None:
    """Every error that a route may raise, as our body. What is not handled here becomes a 500 at the edge."""
    app.add_exception_handler(ServiceError, _service_error)
    app.add_exception_handler(HTTPException, _http_error)
    app.add_exception_handler(RequestValidationError, _parameter_error)
    for kind in (OperationalError, InterfaceError, PoolTimeoutError):
        app.add_exception_handler(kind, _database_error)


async def _service_error(_request: Request, error: Exception) -> Response:
    assert isinstance(error, ServiceError)
    return error_response(error)


async def _http_error(request: Request, error: Exception) -> Response:
    assert isinstance(error, HTTPException)
    if error.status_code == 404:
        wrapped = ServiceError(404, "route_not_found", "Nothing lives at this path; see /openapi.json for what does.")
    elif error.status_code == 405:
        allowed = (error.headers or {}).get("Allow", "another one")
        message = f"Expected the method {allowed} here, found {request.method[:20]}."
        wrapped = ServiceError(405, "method_not_allowed", message, headers=dict(error.headers or {}))
    else:
        wrapped = ServiceError(error.status_code, "http_error", str(error.detail), headers=dict(error.headers or {}))
    return error_response(wrapped)


async def _parameter_error(_request: Request, error: Exception) -> Response:
    assert isinstance(error, RequestValidationError)
    details: list[dict[str, Any]] = []
    for problem in error.errors():
        param = str(problem["loc"][1]) if len(problem["loc"]) > 1 else None
        message = str(problem["msg"]).replace("Input should be", "expected")
        text = f"{param}: {message}, found {found(problem['input'])}."
        details.append({"param": param, "code": "invalid_value", "message": text})
    first = details[0]
    return error_response(ServiceError(400, "invalid_value", first["message"], param=first["param"], details=details))


async def _database_error(_request: Request, error: Exception) -> Response:
    assert isinstance(error, DBAPIError | PoolTimeoutError)
    message = "The database does not answer. Try again, with the same Idempotency-Key if you create something."
    return error_response(ServiceError(503, "database_unavailable", message, headers={"retry-after": "1"}))
