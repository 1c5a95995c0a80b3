"""What every message of a worker is held to before it may touch the database. Pure."""

from __future__ import annotations

import json
import math
import re
from collections.abc import Iterable
from typing import Any, NoReturn

import grpc
from google.protobuf.descriptor import FieldDescriptor
from google.protobuf.message import Message
from google.protobuf.unknown_fields import UnknownFieldSet

from finery.data.strict_json import is_too_deep

_SHA256 = re.compile(r"[0-9a-f]{64}")


class Refused(Exception):  # noqa: N818 - an answer, not an accident
    """The call changes nothing and ends with this status."""

    def __init__(self, code: grpc.StatusCode, message: str) -> None:
        super().__init__(message)
        self.code = code
        self.message = message


def invalid(message: str) -> NoReturn:
    raise Refused(grpc.StatusCode.INVALID_ARGUMENT, message)


def not_now(message: str) -> NoReturn:
    raise Refused(grpc.StatusCode.FAILED_PRECONDITION, message)


def fenced_off(message: str) -> NoReturn:
    raise Refused(grpc.StatusCode.ABORTED, message)


def no_unknown_fields(message: Message, path: str = "") -> None:
    """protobuf drops what it does not know silently; here it is refused, at any depth."""
    fields = UnknownFieldSet(message)
    unknown = [fields[index].field_number for index in range(len(fields))]
    if unknown:
        where = path or message.DESCRIPTOR.name
        invalid(f"{where}: expected known fields only, found field numbers {unknown}; upgrade the service first")
    for field, value in message.ListFields():
        if field.type == FieldDescriptor.TYPE_MESSAGE and not _is_map(field):
            children: Iterable[Message] = value if field.is_repeated else (value,)
            for child in children:
                no_unknown_fields(child, f"{path}.{field.name}" if path else field.name)


def _is_map(field: FieldDescriptor) -> bool:
    return field.message_type is not None and bool(field.message_type.GetOptions().map_entry)


def json_object(text: str, field: str) -> dict[str, Any]:
    """A JSON object that the database can hold: no NaN or infinity, no NUL, no half surrogates. Empty text is an empty
    object."""
    value = _json(text, field, "object") if text else {}
    if not isinstance(value, dict):
        invalid(f"{field}: expected a JSON object, found {type(value).__name__}")
    return value


def json_array(text: str, field: str) -> list[Any]:
    """As `json_object`, of a list."""
    value = _json(text, field, "array")
    if not isinstance(value, list):
        invalid(f"{field}: expected a JSON array, found {type(value).__name__}")
    return value


def _json(text: str, field: str, kind: str) -> Any:
    try:
        value = json.loads(text, parse_constant=_refuse_constant)
        if not is_too_deep(value):  # it would be stored, and no reader could show it
            return _clean(value)
    except ValueError as problem:
        invalid(f"{field}: expected a JSON {kind}, found {problem}")
    except RecursionError:
        pass
    invalid(f"{field}: expected a JSON {kind}, found one that is nested too deeply")


def sha256(text: str, field: str) -> str:
    if not _SHA256.fullmatch(text):
        invalid(f"{field}: expected 64 lower-case hex digits, found {text[:80]!r}")
    return text


def key_below(text: str, prefix: str, field: str) -> str:
    """An object key (or key prefix) that lies under `prefix`."""
    if not text.startswith(prefix) or len(text) == len(prefix) or not plain_path(text.rstrip("/")):
        invalid(f"{field}: expected an object key below {prefix!r}, found {text[:200]!r}")
    return text


def plain_path(path: str) -> bool:
    """Relative, forward slashes, no empty, `.` or `..` part, nothing unprintable."""
    return path.isprintable() and "\\" not in path and all(part not in ("", ".", "..") for part in path.split("/"))


def _refuse_constant(name: str) -> NoReturn:
    raise ValueError(f"{name}, which JSON does not have")


def _clean(value: Any) -> Any:
    if isinstance(value, str):
        return value.replace("\0", "\ufffd").encode("utf-16", "surrogatepass").decode("utf-16", "replace")
    if isinstance(value, float) and not math.isfinite(value):
        raise ValueError("a number that is too large")
    if isinstance(value, dict):
        return {_clean(key): _clean(item) for key, item in value.items()}
    if isinstance(value, list):
        return [_clean(item) for item in value]
    return value
