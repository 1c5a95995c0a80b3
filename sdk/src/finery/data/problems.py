"""How the functions that read parts of a row say what is wrong with it."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, Final

from finery.data.strict_json import MAX_NESTING, dotted, flaws, is_too_deep
from finery.types.errors import Problem

MISSING: Final = object()
"""The value of a key that is not there: `row.get(key, MISSING)`."""

_KINDS = {bool: "a boolean", int: "a number", float: "a number", str: "a text", list: "a list", dict: "an object"}

Place = Callable[[int], str]
"""The path of a row's nth message: `messages[0]`, or `prompt[0]` and `completion[0]`."""


class RowError(Exception):
    """Carries the first problem of a row to `read_row`, which returns it."""

    def __init__(self, code: str, path: str, message: str, hint: str) -> None:
        super().__init__(message)
        self.problem = Problem(code=code, path=path, message=message, hint=hint)


def wrong_type(path: str, expected: str, value: Any, hint: str | None = None) -> RowError:
    return RowError("wrong_type", path, f"expected {expected}, found {kind(value)}", hint or f"Write {expected} there.")


def kind(value: Any) -> str:
    if value is MISSING:
        return "nothing"
    return "null" if value is None else _KINDS.get(type(value), f"a {type(value).__name__}")


def text_of(value: Any, path: str, expected: str = "a text") -> str:
    """`value` if it is a text that can be stored and trained on."""
    if not isinstance(value, str):
        raise wrong_type(path, expected, value)
    if not is_clean(value):
        check_json(value, path)
    return value


def is_clean(text: str) -> bool:
    """Whether it has neither U+0000 nor half a character."""
    if "\0" in text:
        return False
    try:
        text.isascii() or text.encode()
    except UnicodeEncodeError:
        return False
    return True


def check_json(value: Any, path: str) -> None:
    """Raises the first flaw of a value that is used as it is, and may not have come from the strict reader."""
    if is_too_deep(value):
        message = f"expected lists and objects at most {MAX_NESTING} deep inside each other, found more"
        raise RowError("invalid_json", path, message, "Flatten the value.")
    flaw = next(flaws(value), None)
    if flaw is not None:
        inside = dotted(flaw.path)
        place = f"{path}{'.' if path and inside and inside[0] != '[' else ''}{inside}"
        raise RowError(flaw.code, place, flaw.message, "Mend the value.")


def no_tools(row: dict[str, Any]) -> None:
    """Of a row without messages."""
    if row.get("tools") is not None:
        message = "expected tools with messages only, for the model's template to print"
        raise RowError("unsupported_field", "tools", message, "Leave them out, or write messages.")
