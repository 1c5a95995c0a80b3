"""JSON bodies: read with a limit, parsed strictly, errors named by field."""

from __future__ import annotations

from collections.abc import AsyncIterator, Callable
from dataclasses import dataclass
from typing import Any, Generic, TypeVar, get_args

from fastapi import Request
from pydantic import ValidationError

from finery.data.strict_json import MAX_NESTING, StrictReader, canonical_sha256, dotted, is_too_deep, printable
from finery.types import base
from finery_service.errors import ServiceError
from finery_service.http.names import has, meant
from finery_service.http.problems import UNKNOWN, Problem, found, problems_of

B = TypeVar("B", bound=base.Request)

TOLD = 20
"""Errors that an answer names."""
_LOOKED_AT = 1000
"""A body may hold a hundred thousand wrong fields; all other requests wait while we look at them."""


@dataclass(frozen=True)
class Body(Generic[B]):
    value: B
    sha256: str
    """Of the canonical JSON: the order of keys does not matter."""


class OneOf(Generic[B]):
    """Bodies of several kinds, told apart by the text in one field: a discriminated union, read by its members, so
    that errors are those of the kind that was meant."""

    def __init__(self, union: Any) -> None:
        """`union` is `Annotated[A | B, Field(discriminator=…)]`."""
        members, field = get_args(union)
        self.field: str = field.discriminator
        self.kinds: dict[str, type[B]] = {
            get_args(kind.model_fields[self.field].annotation)[0]: kind for kind in get_args(members)
        }

    def kind_of(self, body: Any) -> type[B]:
        """Raises 400 naming the field, and what it may be."""
        if not isinstance(body, dict):
            raise ServiceError(400, "invalid_value", f"Expected a JSON object as the body, found {found(body)}.")
        tag = body.get(self.field)
        if isinstance(tag, str) and tag in self.kinds:
            return self.kinds[tag]
        told = found(tag) if self.field in body else "nothing"
        code = "invalid_value" if self.field in body else "missing_field"
        raise _refusal([(self.field, code, f"expected one of {', '.join(map(repr, self.kinds))}, found {told}")], 1)

    def with_field(self, name: str) -> list[str]:
        """The tags of the kinds that have a field of this dotted name."""
        return [tag for tag, kind in self.kinds.items() if has(kind, name)]


async def read_json(
    request: Request, kind: type[B] | OneOf[B], limit: int, *, root_param: str | None = None
) -> Body[B]:
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


def parse_json(raw: bytes, kind: type[B] | OneOf[B], *, root_param: str | None = None) -> Body[B]:
    """See `read_json`. No body at all is that with all defaults, if there is one."""
    if not raw and not isinstance(kind, OneOf) and not any(field.is_required() for field in kind.model_fields.values()):
        raw = b"{}"
    value = _read(raw)
    chosen = kind.kind_of(value) if isinstance(kind, OneOf) else kind
    try:
        return Body(chosen.model_validate_json(raw), canonical_sha256(value))
    except ValidationError as error:
        errors = error.errors(include_url=False)
        problems = problems_of(errors[:_LOOKED_AT], value, root_param)
        others = kind if isinstance(kind, OneOf) else None
        told = [_hinted(problem, chosen, others) for problem in problems[:TOLD]]
        raise _refusal(told, len(problems) + len(errors[_LOOKED_AT:])) from None


def _read(raw: bytes) -> Any:
    try:
        value, flaws = StrictReader().read(raw.decode())
    except UnicodeDecodeError as error:
        message = f"Expected a JSON body in UTF-8, found an invalid byte at offset {error.start}."
        raise ServiceError(400, "invalid_utf8", message) from None
    except ValueError as error:
        raise ServiceError(400, "invalid_json", f"Expected a JSON object as the body: {error}.") from None
    if is_too_deep(value):
        message = f"Expected lists and objects at most {MAX_NESTING} deep inside each other, found more; flatten them."
        raise ServiceError(400, "invalid_json", message)
    if flaws:
        first = flaws[:TOLD]
        raise _refusal([(dotted(flaw.path) or None, flaw.code, flaw.message) for flaw in first], len(flaws))
    return value


def _hinted(problem: Problem, kind: type[base.Request], others: OneOf[Any] | None) -> Problem:
    """Of an unknown field: which one was probably meant, or that another kind of body has it."""
    param, code, text = problem
    if not param or code != UNKNOWN:
        return problem
    if others and not has(kind, param) and (owners := others.with_field(param)):
        return (param, code, f"{text}, as it belongs to {others.field} {' and '.join(owners)}")
    name = meant(kind, param)
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
