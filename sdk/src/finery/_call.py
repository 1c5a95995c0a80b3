"""One request of the API, and how its parts are written. Pure: nothing here sends."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from datetime import UTC, datetime
from decimal import Decimal
from typing import Any, Generic, Literal, TypeVar
from urllib.parse import quote

from pydantic import BaseModel
from pydantic_core import PydanticSerializationError, to_jsonable_python

from finery._multipart import Multipart
from finery.data.strict_json import dotted, flaws
from finery.errors import InvalidArgumentError
from finery.types.base import Request, Resource

T = TypeVar("T")
Params = tuple[tuple[str, str], ...]


class Nothing(Resource):
    """The answer to a deletion: whatever the server says, nothing is left to hand out."""


@dataclass(frozen=True)
class Call(Generic[T]):
    """One request and the class of its answer; the same bytes on every attempt."""

    method: Literal["GET", "POST", "PATCH", "DELETE"]
    path: str
    expect: type[T]
    params: Params = ()
    json: Any = None
    file: Multipart | None = None
    headers: tuple[tuple[str, str], ...] = ()
    idempotency_key: str | None = None

    def body(self) -> bytes | None:
        """UTF-8 JSON, or None if the call has none."""
        if self.json is None:
            return None
        try:
            return json.dumps(self.json, ensure_ascii=False, allow_nan=False, separators=(",", ":")).encode()
        except ValueError:
            flaw = next(flaws(self.json), None)
            what = f"{dotted(flaw.path)}: {flaw.message}" if flaw else "expected JSON, found what JSON does not have"
            raise InvalidArgumentError(f"{self.path}: {what}") from None

    def with_params(self, **changes: str | int | None) -> Call[T]:
        kept = tuple(item for item in self.params if item[0] not in changes)
        return replace(self, params=kept + query(**changes))


def to_body(fields: BaseModel | Mapping[str, Any]) -> Any:
    """JSON for a request. Of request classes what was set, as the server tells a default from a wish; a resource stands
    for its id."""
    if isinstance(fields, BaseModel):
        return fields.model_dump(mode="json", exclude_unset=True)
    return {name: _value(value) for name, value in fields.items()}


def _value(value: Any) -> Any:
    if isinstance(value, Resource) and isinstance(id_ := getattr(value, "id", None), str):
        return id_
    if isinstance(value, Request):
        return to_body(value)
    if isinstance(value, datetime):
        return time_text("a time", value)
    if isinstance(value, Mapping):
        return {str(name): _value(item) for name, item in value.items()}
    if isinstance(value, (list, tuple)):
        return [_value(item) for item in value]
    if isinstance(value, Decimal):
        return format(value, "f")  # 0.0000004, not 4E-7
    if isinstance(value, float):
        return value  # NaN is refused by `Call.body`, not turned into null
    try:
        return to_jsonable_python(value)
    except PydanticSerializationError:
        hint = '; finery.graders.python("reward.py") sends a Python grader' if callable(value) else ""
        kind = type(value).__name__
        raise InvalidArgumentError(f"expected what JSON can hold, found {kind}: {value!r:.80}{hint}") from None


def given(fields: Mapping[str, Any]) -> dict[str, Any]:
    """Without what is None: the server's default holds."""
    return {name: value for name, value in fields.items() if value is not None}


def query(**values: str | int | None) -> Params:
    return tuple((name, str(value)) for name, value in values.items() if value is not None)


def any_of(name: str, values: str | Sequence[str] | None) -> Params:
    """One value or several, of which any will do."""
    several = () if values is None else (values,) if isinstance(values, str) else values
    return tuple((name, str(value)) for value in several)


def id_of(value: Resource | str, noun: str) -> str:
    """The id itself, or the id of the resource; never a text that would change the path."""
    text = value if isinstance(value, str) else getattr(value, "id", None)
    if not isinstance(text, str) or text in ("", ".", ".."):
        raise InvalidArgumentError(f"expected the id of a {noun}, found {value!r}")
    return text


def segment(value: Resource | str, noun: str) -> str:
    return quote(id_of(value, noun), safe="")


def time_text(name: str, value: datetime | None) -> str | None:
    if value is None:
        return None
    if not isinstance(value, datetime):
        raise TypeError(f"{name}: expected a datetime with a zone, found {type(value).__name__}")
    if value.tzinfo is None:
        raise InvalidArgumentError(
            f"{name}: expected a time with a zone, found the naive {value.isoformat()}; "
            "use datetime(…, tzinfo=timezone.utc), or .astimezone() for local time"
        )
    return value.astimezone(UTC).isoformat().replace("+00:00", "Z")
