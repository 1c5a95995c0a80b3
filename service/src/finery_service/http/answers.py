"""Answers and error bodies: strict JSON, one shape for every error, FastAPI's own included."""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Sequence
from typing import Any

from fastapi import APIRouter, FastAPI, Request, Response
from fastapi.exceptions import RequestValidationError
from fastapi.routing import APIRoute
from sqlalchemy.exc import DBAPIError, InterfaceError, InternalError, OperationalError
from sqlalchemy.exc import TimeoutError as PoolTimeoutError
from starlette.exceptions import HTTPException
from starlette.routing import Match

from finery.types.base import Resource
from finery.types.errors import ErrorBody
from finery_service.errors import ServiceError
from finery_service.http.bodies import TOLD
from finery_service.http.problems import found

Handler = Callable[[Request, Exception], Awaitable[Response]]


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


def install_handlers(app: FastAPI, routers: Sequence[APIRouter]) -> None:
    """Every error that a route may raise, as our body. What is not handled here becomes a 500 at the edge."""
    app.add_exception_handler(ServiceError, _service_error)
    app.add_exception_handler(HTTPException, _http_error(routers))
    app.add_exception_handler(RequestValidationError, _parameter_error)
    for kind in (OperationalError, InterfaceError, InternalError, PoolTimeoutError):
        app.add_exception_handler(kind, _database_error)


async def _service_error(_request: Request, error: Exception) -> Response:
    assert isinstance(error, ServiceError)
    return error_response(error)


def _http_error(routers: Sequence[APIRouter]) -> Handler:
    async def handle(request: Request, error: Exception) -> Response:
        assert isinstance(error, HTTPException)
        headers = dict(error.headers or {})
        if error.status_code == 404:
            message = "Nothing lives at this path; see /openapi.json for what does."
            return error_response(ServiceError(404, "route_not_found", message))
        if error.status_code == 405:
            allowed = ", ".join(_methods(routers, request))
            message = f"Expected {allowed} here, found another method."
            return error_response(ServiceError(405, "method_not_allowed", message, headers={"allow": allowed}))
        return error_response(ServiceError(error.status_code, "http_error", str(error.detail), headers=headers))

    return handle


def _methods(routers: Sequence[APIRouter], request: Request) -> list[str]:
    """All methods of the path: the framework names those of its first route only."""
    routes = [route for router in routers for route in router.routes if isinstance(route, APIRoute)]
    matching = [route for route in routes if route.matches(request.scope)[0] is not Match.NONE]
    methods = {method for route in matching for method in route.methods or ()}
    return sorted(methods | {"HEAD"} if "GET" in methods else methods)  # the edge answers HEAD wherever there is a GET


async def _parameter_error(_request: Request, error: Exception) -> Response:
    assert isinstance(error, RequestValidationError)
    details: list[dict[str, Any]] = []
    for problem in error.errors()[:TOLD]:
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
