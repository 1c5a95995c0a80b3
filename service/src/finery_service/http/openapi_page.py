"""The OpenAPI page: FastAPI's, with what it leaves out or says wrongly."""

from __future__ import annotations

import ast
import inspect
import sys
from collections.abc import Iterator, Sequence
from functools import cache
from typing import Any

from fastapi import FastAPI
from fastapi.openapi.utils import get_openapi
from pydantic import BaseModel
from pydantic.json_schema import models_json_schema

from finery.types import base
from finery_service.http.examples import examples

_PATHS = {
    "file_id": "Id of a file: `file_…`",
    "preview_id": "Id of a preview: `prev_…`",
    "environment_id": "Id of an environment: `env_…`",
    "run_id": "Id of a run: `erun_…`",
    "name_or_id": "Name of a model, or its id: `mdl_…`",
    "job_id": "Id of a job: `job_…`",
    "checkpoint_id": "Id of a checkpoint: `ckpt_…`",
    "path": "Path of one of its files, slashes and all",
    "tenant_id": "Id of a tenant: `ten_…`",
    "key_id": "Id of a key: `key_…`",
}
_REQUEST_ID = {
    "description": "Of this request; the client's own if it sent one. Name it when you ask for help.",
    "schema": {"type": "string"},
}
_RETRY_AFTER = {"description": "Seconds to wait before the same request is worth a try.", "schema": {"type": "string"}}


def install_openapi(app: FastAPI, bodies: Sequence[type[BaseModel]]) -> None:
    """Make `app.openapi()` tell the truth; `bodies` are the request classes that `json_body` refers to."""

    def build() -> dict[str, Any]:
        if app.openapi_schema is None:
            app.openapi_schema = _build(app, bodies)
        return app.openapi_schema

    app.openapi = build  # type: ignore[method-assign]


def _build(app: FastAPI, bodies: Sequence[type[BaseModel]]) -> dict[str, Any]:
    page = get_openapi(title=app.title, version=app.version, description=app.description, routes=app.routes)
    schemas = page["components"]["schemas"]
    for unused in ("HTTPValidationError", "ValidationError"):
        schemas.pop(unused, None)
    _, definitions = models_json_schema(
        [(body, "validation") for body in bodies], ref_template="#/components/schemas/{model}"
    )
    schemas.update(definitions.get("$defs", {}))
    _describe(schemas)
    _exemplify(schemas)
    bearer = {"type": "http", "scheme": "bearer", "description": "fny_… of a tenant, fop_… of an operator."}
    page["components"]["securitySchemes"] = {"key": bearer}
    for path, operations in page["paths"].items():
        for operation in operations.values():
            _repair(operation, guarded=path.startswith("/v1/"))
    return page


def _describe(schemas: dict[str, Any]) -> None:
    """The sentences that stand below the fields in `finery.types`, as descriptions."""
    for kind in _vocabulary(base.Request, base.Resource):
        properties = schemas.get(kind.__name__, {}).get("properties", {})
        for field, sentence in _field_docs(kind).items():
            if field in properties:
                properties[field]["description"] = sentence


def _vocabulary(*roots: type[BaseModel]) -> Iterator[type[BaseModel]]:
    for root in roots:
        for kind in root.__subclasses__():
            if kind.__module__.startswith("finery.types."):
                yield kind
            yield from _vocabulary(kind)


def _field_docs(kind: type[BaseModel]) -> dict[str, str]:
    """By field, inherited ones too."""
    docs: dict[str, str] = {}
    for base_ in reversed(kind.__mro__):
        if base_.__module__.startswith("finery.types."):
            docs |= _docs_of_module(base_.__module__).get(base_.__name__, {})
    return docs


@cache
def _docs_of_module(module: str) -> dict[str, dict[str, str]]:
    """By class and field."""
    tree = ast.parse(inspect.getsource(sys.modules[module]))
    return {node.name: _docs_of_class(node) for node in ast.walk(tree) if isinstance(node, ast.ClassDef)}


def _docs_of_class(node: ast.ClassDef) -> dict[str, str]:
    docs: dict[str, str] = {}
    for field, after in zip(node.body, node.body[1:], strict=False):
        sentence = _text(after)
        if isinstance(field, ast.AnnAssign) and isinstance(field.target, ast.Name) and sentence is not None:
            docs[field.target.id] = " ".join(sentence.split())
    return docs


def _text(node: ast.stmt) -> str | None:
    value = node.value.value if isinstance(node, ast.Expr) and isinstance(node.value, ast.Constant) else None
    return value if isinstance(value, str) else None


def _exemplify(schemas: dict[str, Any]) -> None:
    for name, example in examples().items():
        if name not in schemas:
            continue
        schemas[name]["example"] = example
        if f"Page_{name}_" in schemas:
            page = {"object": "list", "data": [example], "has_more": False, "last_id": example.get("id")}
            schemas[f"Page_{name}_"]["example"] = page


def _repair(operation: dict[str, Any], *, guarded: bool) -> None:
    operation["responses"] = {
        status: response
        for status, response in sorted(operation["responses"].items())
        # FastAPI's own 422: we answer 400 with our body.
        if "HTTPValidationError" not in str(response)
    }
    operation["summary"] = operation["summary"].strip()
    for parameter in operation.get("parameters", ()):
        if parameter["in"] == "path":
            parameter["description"] = _PATHS[parameter["name"]]
    if guarded:
        operation["security"] = [{"key": []}]
    for status, response in operation["responses"].items():
        _repair_response(status, response)


def _repair_response(status: str, response: dict[str, Any]) -> None:
    headers = response.setdefault("headers", {})
    headers["x-request-id"] = _REQUEST_ID
    if status in ("429", "503") or response["description"] == "request_in_progress":
        headers["retry-after"] = _RETRY_AFTER
    if response["description"] == "Successful Response":
        response["description"] = "Done."
    if int(status) >= 400:
        # FastAPI leaves nulls out, and we never do.
        response["content"]["application/json"]["example"]["error"].setdefault("param", None)
