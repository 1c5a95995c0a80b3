"""JSON bodies: read with a limit, parsed strictly, errors named by field."""

from __future__ import annotations

import re
from collections.abc import AsyncIterator, Callable
from dataclasses import dataclass
from typing import Any, Generic, TypeVar

from fastapi import Request
from pydantic import ValidationError
from pydantic_core import ErrorDetails

from finery.data.strict_json import StrictReader, canonical_sha256, dotted, printable
from finery.types import base
from finery_service.errors import ServiceError
from finery_service.http.names import meant

B = TypeVar("B", bound=base.Request)

_CODES = {"missing": "missing_field", "extra_forbidden": "unknown_field"}
_WORDS = {
    "Input should be": "expected",
    "String should match pattern": "expected a text that matches",
    "String should have": "expected a text with",
    "Field required": "expected this field, found nothing",
    "Unable to extract tag using discriminator": "expected",
    "Extra inputs are not permitted": "expected no field of this name",
}
_TAGGED = ("union_tag_invalid", "union_tag_not_found", "adapter_type")
_ID = re.compile(r"\^([a-z]+_)\[")
"""The pattern of an id, as in `finery.types.ids`."""
TOLD = 20
"""Errors that an answer names."""
_LOOKED_AT = 1000
"""A body may hold a hundred thousand wrong fields; all other requests wait while we look at them."""

Problem = tuple[str | None, str, str]
"""Field, code, sentence."""


@dataclass(frozen=True)
class Body(Generic[B]):
    value: B
    sha256: str
    """Of the canonical JSON: the order of keys does not matter."""


async def read_json(request: Request, kind: type[B], limit: int, *, root_param: str | None = None) -> Body[B]:
    """The request's body as a `kind`.

    Raises 400 naming every wrong field, 413 over `limit` bytes, 415 if it is compressed. `root_param` is named where
    the error is about several fields together.
    """
    refuse_compressed(request)
    raw = b"".join([chunk async for chunk in limited(request, limit, body_too_large)])
    return parse_json(raw, kind, root_param=root_param)


def refuse_compressed(request: Request) -> None:
    encoding = request.headers.get("content-encoding", "identity").strip().lower()
    if encoding not in ("identity", ""):
        message = f"Expected a body without Content-Encoding, found {printable(encoding)!r}; send it uncompressed."
        raise ServiceError(415, "unsupported_content_encoding", message, param="content-encoding")


async def limited(request: Request, limit: int, too_large: Callable[[int], ServiceError]) -> AsyncIterator[bytes]:
    """The body's chunks; raises `too_large(limit)` as soon as it is known to be longer than `limit` bytes."""
    declared = request.headers.get("content-length", "0")
    if declared.isdigit() and int(declared) > limit:
        raise too_large(limit)
    received = 0
    async for chunk in request.stream():
        received += len(chunk)
        if received > limit:
            raise too_large(limit)
        yield chunk


def body_too_large(limit: int) -> ServiceError:
    message = f"Expected a body of at most {limit} bytes, found more; send less."
    return ServiceError(413, "body_too_large", message, details=[{"limit": limit}])


def parse_json(raw: bytes, kind: type[B], *, root_param: str | None = None) -> Body[B]:
    """See `read_json`. No body at all is that with all defaults, if there is one."""
    if not raw and not any(field.is_required() for field in kind.model_fields.values()):
        raw = b"{}"
    try:
        value, flaws = StrictReader().read(raw.decode())
    except UnicodeDecodeError as error:
        message = f"Expected a JSON body in UTF-8, found an invalid byte at offset {error.start}."
        raise ServiceError(400, "invalid_utf8", message) from None
    except ValueError as error:
        raise ServiceError(400, "invalid_json", f"Expected a JSON object as the body: {error}.") from None
    if flaws:
        first = flaws[:TOLD]
        raise _refusal([(dotted(flaw.path) or None, flaw.code, flaw.message) for flaw in first], len(flaws))
    try:
        return Body(kind.model_validate_json(raw), canonical_sha256(value))
    except ValidationError as error:
        errors = error.errors(include_url=False)
        problems = _deepest([_problem(problem, value, root_param) for problem in errors[:_LOOKED_AT]])
        told = [_hinted(problem, kind) for problem in problems[:TOLD]]
        raise _refusal(told, len(problems) + len(errors[_LOOKED_AT:])) from None


def _deepest(problems: list[Problem]) -> list[Problem]:
    """Without those of a field inside which there is another: of a union, every member complains."""
    above = {param[:end] for param, _, _ in problems if param for end, c in enumerate(param) if c in ".["}
    return [problem for problem in problems if problem[0] not in above]


def _hinted(problem: Problem, kind: type[base.Request]) -> Problem:
    param, code, text = problem
    name = meant(kind, param) if param and code == _CODES["extra_forbidden"] else None
    return (param, code, f"{text} (did you mean {name}?)") if name else problem


def _refusal(problems: list[Problem], count: int) -> ServiceError:
    """`count` of all that there are; `problems` are the first of them."""
    details = [
        {"param": param, "code": code, "message": f"{param}: {text}." if param else f"{text[:1].upper()}{text[1:]}."}
        for param, code, text in problems[:TOLD]
    ]
    param, code, _ = problems[0]
    more = f" ({count - 1} more{_where(count)}.)" if count > 1 else ""
    return ServiceError(400, code, f"{details[0]['message']}{more}", param=param, details=details)


def _where(count: int) -> str:
    return " in details" if count <= TOLD else f", the first {TOLD} in details"


def _problem(error: ErrorDetails, body: Any, root_param: str | None) -> Problem:
    kind = error["type"]
    param = field_name(error["loc"], body, missing=kind == "missing") or None
    if param is None and kind == "value_error":
        param = root_param
    message = _message(error)
    if kind not in _CODES and "found" not in message:
        message += f", found {_found_in(error)}"
    if kind == "string_pattern_mismatch" and error["ctx"]["pattern"].startswith("^file_"):
        message += "; upload a file of yours first (client.files.upload, or finery files upload) and give its id"
    return param, _CODES.get(kind, "invalid_value"), message


def _found_in(error: ErrorDetails) -> str:
    sent = error["input"]
    if error["type"] in _TAGGED and isinstance(sent, dict):
        name = error.get("ctx", {}).get("discriminator", "'type'").strip("'")
        return f"{name} {found(sent[name])}" if name in sent else f"no {name}"
    return found(sent)


def _message(error: ErrorDetails) -> str:
    message = error["msg"].removeprefix("Value error, ")
    if error["type"] == "union_tag_invalid":  # pydantic repeats what was sent
        message = f"expected one of {error['ctx']['expected_tags']} as {error['ctx']['discriminator']}"
    if error["type"] == "string_pattern_mismatch" and (prefix := _ID.match(error["ctx"]["pattern"])):
        message = f"expected an id that begins with {prefix[1]}"
    for theirs, ours in _WORDS.items():
        message = message.replace(theirs, ours)
    sent = error["input"]
    if isinstance(sent, str):
        message = message.replace(repr(sent), found(sent))
    return message[:1].lower() + message[1:]


def field_name(loc: tuple[int | str, ...], body: Any, *, missing: bool) -> str:
    """pydantic's place as a field of `body`, without the names of union members that pydantic puts in."""
    path: list[int | str] = []
    for place, part in enumerate(loc):
        is_last = place == len(loc) - 1
        if isinstance(body, dict) and isinstance(part, str) and (part in body or (missing and is_last)):
            path.append(part)
            body = body.get(part)
        elif isinstance(body, list) and isinstance(part, int) and part < len(body):
            path.append(part)
            body = body[part]
    return dotted(path)


def found(value: Any) -> str:
    """What was sent, as far as it may be repeated: a text may be a secret in the wrong field."""
    if value is None or isinstance(value, bool):
        return {None: "null", True: "true", False: "false"}[value]
    if isinstance(value, (int, float)):
        return repr(value)[:40]
    if isinstance(value, str):
        is_word = len(value) <= 16 and re.sub("[-._]", "", value).isalnum()
        return f"{value!r}" if is_word else f"a text of {len(value)} characters"
    if isinstance(value, (list, dict)):
        return "a list" if isinstance(value, list) else "an object"
    return "something else"
