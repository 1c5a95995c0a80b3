"""What routes say of themselves for the OpenAPI page: their errors, and the bodies that we parse ourselves."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Literal

from pydantic import BaseModel

from finery.types.errors import ErrorBody, ErrorDetail
from finery_service.errors import ServiceError
from finery_service.http.bodies import OneOf
from finery_service.http.examples import TAIL

_CODES: dict[str, tuple[int, str, str | None]] = {
    "invalid_value": (400, "name: expected a text with at least 1 character, found a text of 0 characters.", "name"),
    "unknown_parameter": (400, "Expected no query parameters, found 'verbose'.", "verbose"),
    "invalid_cursor": (400, "Expected the id of an object of this list, found another text.", "after"),
    "invalid_time": (400, "start: expected an RFC 3339 time with a zone, found '2026-12-01'.", "start"),
    "missing_file": (400, "Expected a part named file with the data, found none.", "file"),
    "invalid_api_key": (
        401,
        "Expected one header `Authorization: Bearer <key>` with a valid key, found none.",
        None,
    ),
    "operator_key_required": (403, "Expected an operator's key, found a tenant's.", None),
    "tenant_key_required": (403, "Expected a tenant's key (fny_…), found an operator's.", None),
    "request_in_progress": (
        409,
        "A request with this Idempotency-Key is still running; repeat it in a second.",
        "idempotency-key",
    ),
    "job_already_terminal": (
        409,
        "Expected a job that has not ended, found one that has succeeded; there is nothing to cancel.",
        None,
    ),
    "job_is_being_cancelled": (
        409,
        "Expected a job that is to go on, found one that is being cancelled; a cancel cannot be withdrawn.",
        None,
    ),
    "checkpoint_in_use": (
        409,
        f"Expected one that nothing needs, found that job job_{TAIL} starts from it.",
        None,
    ),
    "file_in_use": (409, f"Expected one that no open job needs, found that job job_{TAIL} does.", None),
    "body_too_large": (413, "Expected a body of at most 1048576 bytes, found more; send less.", None),
    "file_too_large": (413, "Expected a file of at most 10737418240 bytes, found a longer one; split it.", "file"),
    "unsupported_content_encoding": (
        415,
        "Expected a body without Content-Encoding, found 'gzip'; send it uncompressed.",
        "content-encoding",
    ),
    "range_not_satisfiable": (
        416,
        "Expected a range that begins before byte 1000, found bytes=1000-.",
        "range",
    ),
    "idempotency_key_reused": (
        422,
        "Expected a fresh Idempotency-Key, found one that was used for another request; use a new one.",
        "idempotency-key",
    ),
    "too_many_previews": (
        429,
        "Expected at most 20 previews that are not ready yet, found them; wait for one of them.",
        None,
    ),
    "too_many_runs": (429, "Expected at most 20 runs that are not ready yet, found them; wait for one of them.", None),
    "internal_error": (500, "Something went wrong on our side; try again.", None),
    "database_unavailable": (503, "The database does not answer; try again.", None),
}
_USUAL = {status: code for code, (status, _, _) in reversed(_CODES.items())}
"""Status -> the first code of it above."""
COMMON = (401, 500, 503)
Whose = Literal["tenants", "operators", "anyone's"]


def errors(*statuses: int, noun: str = "job", codes: Sequence[str] = ()) -> dict[int | str, dict[str, Any]]:
    """The `responses` of a route that may answer with these statuses; `noun` is what a 404 has not found, and `codes`
    are shown instead of their statuses' usual ones."""
    responses: dict[int | str, dict[str, Any]] = {}
    shown = _USUAL | {_CODES[code][0]: code for code in codes}
    for status in statuses:
        code = f"{noun}_not_found" if status == 404 else shown[status]
        message, param = (f"No {noun} with the id '{noun}_0000' exists.", None) if status == 404 else _CODES[code][1:]
        detail: ErrorDetail = ServiceError(status, code, message, param=param).detail
        example = {"error": detail.model_dump(exclude={"details"})}
        content = {"application/json": {"example": example}}
        responses[status] = {"model": ErrorBody, "description": code, "content": content}
    return responses


def guarded(
    *statuses: int, noun: str = "job", codes: Sequence[str] = (), key: Whose = "tenants"
) -> dict[int | str, dict[str, Any]]:
    """`errors` of a route that asks for a `key` and refuses query parameters that it does not have."""
    if 400 not in statuses:
        codes = ("unknown_parameter", *codes)
    if key == "tenants":
        codes = ("tenant_key_required", *codes)
    wrong_key = set() if key == "anyone's" else {403}
    return errors(*sorted({400, *statuses, *COMMON} | wrong_key), noun=noun, codes=codes)


def json_body(
    kind: type[BaseModel] | OneOf[Any],
    example: dict[str, Any],
    *,
    once: bool = True,
    required: bool = True,
    **more: dict[str, Any],
) -> dict[str, Any]:
    """The `openapi_extra` of a route that reads its JSON body itself. `more` examples have names; `once`: the route
    knows Idempotency-Key."""
    schema = _one_of(kind) if isinstance(kind, OneOf) else _ref(kind)
    examples = {name.replace("_", " "): {"value": value} for name, value in {"usual": example, **more}.items()}
    content = {"application/json": {"schema": schema, "examples": examples}}
    extra: dict[str, Any] = {"requestBody": {"required": required, "content": content}}
    return {**extra, "parameters": [IDEMPOTENCY_KEY]} if once else extra


def _one_of(kind: OneOf[Any]) -> dict[str, Any]:
    refs = {tag: _ref(member) for tag, member in kind.kinds.items()}
    mapping = {tag: ref["$ref"] for tag, ref in refs.items()}
    return {"oneOf": list(refs.values()), "discriminator": {"propertyName": kind.field, "mapping": mapping}}


def _ref(kind: type[BaseModel]) -> dict[str, Any]:
    return {"$ref": f"#/components/schemas/{kind.__name__}"}


IDEMPOTENCY_KEY = {
    "name": "Idempotency-Key",
    "in": "header",
    "required": False,
    "description": "Repeat a request with the same key and it is done once; the second answer is that of the first, "
    "with the header Idempotent-Replayed. 1 to 255 visible ASCII characters. Remembered for 7 days.",
    "schema": {"type": "string", "minLength": 1, "maxLength": 255, "pattern": "^[!-~]+$"},
}
