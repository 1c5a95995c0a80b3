"""The OpenAPI page: every error with its body, an example of each, request bodies that we parse ourselves."""

from __future__ import annotations

from typing import Any

from fastapi import FastAPI
from fastapi.openapi.utils import get_openapi
from pydantic import BaseModel
from pydantic.json_schema import models_json_schema

from finery.types.errors import ErrorBody, ErrorDetail
from finery_service.errors import ServiceError
from finery_service.http.examples import examples

_EXAMPLES: dict[int, tuple[str, str, str | None]] = {
    400: (
        "invalid_value",
        "hyperparameters.learning_rate: expected greater than 0, found -1.",
        "hyperparameters.learning_rate",
    ),
    401: ("invalid_api_key", "Expected one header `Authorization: Bearer <key>` with a valid key, found none.", None),
    403: ("operator_key_required", "Expected an operator's key, found a tenant's.", None),
    404: ("job_not_found", "No job with the id 'job_0000' exists.", None),
    409: ("request_in_progress", "A request with this Idempotency-Key is still running; repeat it in a second.", None),
    413: ("body_too_large", "Expected a body of at most 1048576 bytes, found more; send less.", None),
    415: (
        "unsupported_content_encoding",
        "Expected no Content-Encoding, found 'gzip'.",
        "content-encoding",
    ),
    416: ("range_not_satisfiable", "Expected a range that begins before byte 1000, found bytes=1000-.", "range"),
    422: (
        "idempotency_key_reused",
        "Expected a fresh Idempotency-Key; this one was used.",
        "idempotency-key",
    ),
    500: ("internal_error", "Something went wrong on our side; try again.", None),
    503: ("database_unavailable", "The database does not answer; try again.", None),
}
COMMON = (401, 403, 500, 503)


def errors(*statuses: int, noun: str = "job") -> dict[int | str, dict[str, Any]]:
    """The `responses` of a route that may answer with these statuses; `noun` is what a 404 has not found."""
    responses: dict[int | str, dict[str, Any]] = {}
    for status in statuses:
        code, message, param = _EXAMPLES[status]
        if status == 404:
            code, message = f"{noun}_not_found", f"No {noun} with the id '{noun}_0000' exists."
        detail: ErrorDetail = ServiceError(status, code, message, param=param).detail
        example = {"error": detail.model_dump(exclude={"details"})}
        content = {"application/json": {"example": example}}
        responses[status] = {"model": ErrorBody, "description": code, "content": content}
    return responses


def guarded(*statuses: int, noun: str = "job") -> dict[int | str, dict[str, Any]]:
    """`errors` of a route that asks for a key."""
    return errors(*statuses, *COMMON, noun=noun)


def json_body(kind: type[BaseModel], example: dict[str, Any]) -> dict[str, Any]:
    """The `openapi_extra` of a route that reads its JSON body itself."""
    schema = {"$ref": f"#/components/schemas/{kind.__name__}"}
    content = {"application/json": {"schema": schema, "example": example}}
    return {"requestBody": {"required": True, "content": content}, "parameters": [IDEMPOTENCY_KEY]}


IDEMPOTENCY_KEY = {
    "name": "Idempotency-Key",
    "in": "header",
    "required": False,
    "description": "Repeat a request with the same key and it is done once. 1 to 255 visible ASCII characters.",
    "schema": {"type": "string", "maxLength": 255},
}


def install_openapi(app: FastAPI, bodies: list[type[BaseModel]]) -> None:
    """Make `app.openapi()` tell the truth; `bodies` are the request classes that `json_body` refers to."""

    def build() -> dict[str, Any]:
        if app.openapi_schema is None:
            app.openapi_schema = _build(app, bodies)
        return app.openapi_schema

    app.openapi = build  # type: ignore[method-assign]


def _build(app: FastAPI, bodies: list[type[BaseModel]]) -> dict[str, Any]:
    page = get_openapi(title=app.title, version=app.version, description=app.description, routes=app.routes)
    schemas = page["components"]["schemas"]
    for unused in ("HTTPValidationError", "ValidationError"):
        schemas.pop(unused, None)
    _, definitions = models_json_schema(
        [(body, "validation") for body in bodies], ref_template="#/components/schemas/{model}"
    )
    schemas.update(definitions.get("$defs", {}))
    for name, example in examples().items():
        schemas[name]["example"] = example
    bearer = {"type": "http", "scheme": "bearer", "description": "fny_… of a tenant, fop_… of an operator."}
    page["components"]["securitySchemes"] = {"key": bearer}
    for path, operations in page["paths"].items():
        for operation in operations.values():
            _repair(operation, guarded=path.startswith("/v1/"))
    return page


def _repair(operation: dict[str, Any], *, guarded: bool) -> None:
    operation["responses"] = {
        status: response
        for status, response in operation["responses"].items()
        # FastAPI's own 422: we answer 400 with our body.
        if "HTTPValidationError" not in str(response)
    }
    if guarded:
        operation["security"] = [{"key": []}]
    for response in operation["responses"].values():
        response.setdefault("headers", {})["x-request-id"] = {"schema": {"type": "string"}}
