"""Tools and tool calls in the shapes of OpenAI's API; answers must belong to a call. Raises `RowError`."""

from __future__ import annotations

from typing import Any

from finery.data.problems import MISSING, Place, RowError, check_json, kind, text_of, wrong_type
from finery.data.strict_json import StrictReader, shown

_CALL = '{"id": "…", "type": "function", "function": {"name": "…", "arguments": "{…}"}}'
TOOL = '{"type": "function", "function": {"name": "…", "parameters": {…}}}'


def read_tools(value: Any) -> tuple[dict[str, Any], ...] | None:
    """The row's tools exactly as they were given; None for none."""
    if value is None:
        return None
    if not isinstance(value, list):
        raise wrong_type("tools", "a list of tools", value)
    for n, tool in enumerate(value):
        path = f"tools[{n}]"
        text_of(_function(tool, path, TOOL).get("name", MISSING), f"{path}.function.name", "the tool's name")
        check_json(tool, path)
    return tuple(value) or None


def read_calls(value: Any, path: str) -> list[dict[str, Any]]:
    """The calls with their arguments as objects."""
    if not isinstance(value, list):
        raise wrong_type(path, "a list of tool calls", value)
    return [_call(call, f"{path}[{n}]") for n, call in enumerate(value)]


def _call(given: Any, path: str) -> dict[str, Any]:
    function = _function(given, path, _CALL)
    _only(given, ("id", "type", "function"), path)
    _only(function, ("name", "arguments"), f"{path}.function")
    name = text_of(function.get("name", MISSING), f"{path}.function.name", "the tool's name")
    arguments = _arguments(function.get("arguments", MISSING), f"{path}.function.arguments")
    call = {"type": "function", "function": {"name": name, "arguments": arguments}}
    if given.get("id") is None:
        return call
    return {"id": text_of(given["id"], f"{path}.id"), **call}


def _function(given: Any, path: str, shape: str) -> dict[str, Any]:
    hint = f"Write {shape}."
    if not isinstance(given, dict):
        raise wrong_type(path, "an object", given, hint)
    if given.get("type", MISSING) != "function":
        sort = given.get("type", MISSING)
        found = shown(sort) if isinstance(sort, str) else kind(sort)
        raise RowError("wrong_type", f"{path}.type", f"expected 'function', found {found}", hint)
    function = given.get("function", MISSING)
    if not isinstance(function, dict):
        raise wrong_type(f"{path}.function", "an object", function, hint)
    return function


def _only(given: dict[str, Any], keys: tuple[str, ...], path: str) -> None:
    for key, value in given.items():
        if key not in keys and value is not None:
            found = f"expected {', '.join(keys)}, found {shown(str(key))}"
            raise RowError("unknown_field", path, found, "Leave it out: it would not be trained.")


def _arguments(value: Any, path: str) -> dict[str, Any]:
    """Parsed if they are text, so that templates print both alike."""
    if isinstance(value, str):
        value = _parsed(value, path)
    if not isinstance(value, dict):
        message = f"expected an object, or the JSON text of one, found {kind(value)}"
        raise RowError("invalid_arguments", path, message, 'Write {} or "{}" for no arguments.')
    check_json(value, path)
    return value


def _parsed(text: str, path: str) -> Any:
    try:
        value, flaws = StrictReader().read(text)
    except ValueError as error:
        message = f"expected the JSON text of an object: {error}"[:300]
        raise RowError("invalid_arguments", path, message, 'Write "{}" for no arguments.') from None
    if flaws:
        code = "invalid_arguments" if flaws[0].code == "invalid_json" else flaws[0].code
        raise RowError(code, path, flaws[0].message, "Mend the arguments.")
    return value


def check_calls(messages: list[dict[str, Any]], place: Place) -> None:
    """Every tool message answers a call since the last user message, and each call once; calls may stay unanswered."""
    calls: set[str] = set()
    unnamed = 0
    for n, message in enumerate(messages):
        if message["role"] == "user":
            calls, unnamed = set(), 0
        elif message["role"] == "tool":
            answered = message.get("tool_call_id")
            if answered in calls:
                calls.remove(answered)
            elif answered is None and unnamed:
                unnamed -= 1
            else:
                raise _unmatched(answered, calls, place(n))
        for k, call in enumerate(message.get("tool_calls", ())):
            if call.get("id") in calls:
                found = f"expected an id of its own for each open call, found {shown(call['id'])} twice"
                path = f"{place(n)}.tool_calls[{k}].id"
                raise RowError("duplicate_tool_call_id", path, found, "Give every call another id.")
            if "id" in call:
                calls.add(call["id"])
            else:
                unnamed += 1


def _unmatched(answered: str | None, calls: set[str], path: str) -> RowError:
    open_calls = ", ".join(sorted(map(shown, calls))[:5]) or "none is open"
    found = "none" if answered is None else shown(answered)
    message = f"expected the id of a call that is not answered yet ({open_calls}), found {found}"
    hint = "Give a tool message the id of the assistant's call that it answers."
    return RowError("unmatched_tool_call_id", f"{path}.tool_call_id", message, hint)
