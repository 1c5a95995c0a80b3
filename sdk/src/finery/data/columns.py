"""Arrow columns as rows: which types a column may have, and its values as JSON has them. Imports pyarrow.

Columns are a union: a struct that any row gave a key has that key in every row, as null where it was not given. So a
null field of a struct counts as absent; and what must keep its own keys (tools, the arguments of a call) is JSON text.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import pyarrow as pa

from finery.data.problems import RowError
from finery.data.rows import PROMPT_KEYS, read_row
from finery.types.errors import Problem

TEXT_OR_MESSAGES = ("messages", "prompt", "completion", "chosen", "rejected")
COLUMNS = (*TEXT_OR_MESSAGES, "tools", "text", "input_ids", "labels", "attention_mask")
_OF_THE_PROMPT = ("messages", "prompt", "tools")
_SCALARS = (pa.types.is_integer, pa.types.is_float32, pa.types.is_float64, pa.types.is_boolean, pa.types.is_null)
_CALL_PATH = ("tool_calls", "function", "arguments")


def may_be_prompts(names: Sequence[str]) -> bool:
    """Whether a row with these columns could be a prompt, all of whose columns belong to it."""
    return PROMPT_KEYS.isdisjoint(names) and ("prompt" in names) != ("messages" in names)


def wanted(names: Sequence[str], *, prompts: bool) -> list[str]:
    """Those that are read."""
    return [name for name in names if prompts or name in COLUMNS]


def schema_problem(schema: Any, *, prompts: bool = False) -> Problem | None:
    """Why no row of a file with these columns can be used; of `prompts` all of them are read."""
    names = list(schema.names)
    if twice := sorted({name for name in wanted(names, prompts=prompts) if names.count(name) > 1}):
        message = f"expected one column {twice[0]}, found more than one"
        return Problem(code="duplicate_key", path=twice[0], message=message, hint="Leave one of them out.")
    found = read_row(dict.fromkeys(names))
    if isinstance(found, Problem) and found.code in ("missing_messages", "unsupported_field"):
        return found.model_copy(update={"message": found.message.replace("keys", "columns")})
    try:
        for field in schema:
            if field.name in COLUMNS and (not prompts or field.name in _OF_THE_PROMPT):
                _check_type(field.name, field.type)
            elif prompts:
                _check_free(field.name, field.type)
    except RowError as error:
        return error.problem
    return None


def _check_type(name: str, type_: Any) -> None:
    if pa.types.is_null(type_):
        return
    element = _element(type_)
    if name in TEXT_OR_MESSAGES:
        if element is not None and pa.types.is_struct(element):
            _check_arguments(name, element)
        elif not _is_text(type_):
            other = "their JSON text" if name == "messages" else "text"
            raise _wrong(name, f"a list of structs (messages), or {other}", type_)
    elif name in ("tools", "text"):
        if not _is_text(type_):
            raise _wrong(name, "JSON text, so that each tool keeps its own keys" if name == "tools" else "text", type_)
    elif element is None or not pa.types.is_integer(element):
        raise _wrong(name, "a list of integers", type_)


def _check_free(name: str, type_: Any) -> None:
    """A field that graders see as JSON."""
    if pa.types.is_struct(type_):
        for field in type_:
            _check_free(f"{name}.{field.name}", field.type)
    elif (element := _element(type_)) is not None:
        _check_free(f"{name}[]", element)
    elif not (_is_text(type_) or any(is_it(type_) for is_it in _SCALARS)):
        raise _wrong(name, "text, numbers, booleans, or lists or structs of them", type_)


def _check_arguments(name: str, message: Any) -> None:
    """A struct would give every call the keys of all others."""
    type_ = message
    for key in _CALL_PATH:
        if not pa.types.is_struct(type_) or type_.get_field_index(key) < 0:
            return  # none, or a shape that the rows' own check names
        type_ = type_.field(key).type
        type_ = _element(type_) or type_
    if not _is_text(type_) and not pa.types.is_null(type_):
        path = f"{name}[].tool_calls[].function.arguments"
        raise _wrong(path, "JSON text, so that each call keeps its own keys", type_)


def _wrong(path: str, expected: str, type_: Any) -> RowError:
    found = str(type_)
    found = found if len(found) <= 80 else f"{found[:80]}…"
    return RowError("wrong_type", path, f"expected a column of {expected}, found {found}", f"Write {expected}.")


def _element(type_: Any) -> Any:
    """The type of a list's elements; None if it is no list."""
    is_list = pa.types.is_list(type_) or pa.types.is_large_list(type_) or pa.types.is_fixed_size_list(type_)
    return type_.value_type if is_list else None


def _is_text(type_: Any) -> bool:
    if pa.types.is_dictionary(type_):
        type_ = type_.value_type
    return bool(pa.types.is_string(type_) or pa.types.is_large_string(type_) or pa.types.is_string_view(type_))


def values(array: Any) -> list[Any]:
    """One value for each place: dicts without null fields, lists, texts, numbers, None. Raises UnicodeDecodeError."""
    type_ = array.type
    if isinstance(type_, pa.BaseExtensionType):
        return values(array.storage)
    if pa.types.is_dictionary(type_):
        return values(array.dictionary_decode())
    if pa.types.is_struct(type_):
        return _with_nulls(array, _structs(array))
    if pa.types.is_fixed_size_list(type_):
        return values(array.cast(pa.list_(type_.value_type)))
    if pa.types.is_list(type_) or pa.types.is_large_list(type_):
        return _with_nulls(array, _lists(array))
    found: list[Any] = array.to_pylist()
    return found


def _structs(array: Any) -> list[Any]:
    names = [field.name for field in array.type]
    if not names:
        return [{} for _ in range(len(array))]
    columns = [values(column) for column in array.flatten()]
    return [
        {name: value for name, value in zip(names, row, strict=True) if value is not None}
        for row in zip(*columns, strict=True)
    ]


def _lists(array: Any) -> list[Any]:
    offsets = array.offsets.to_pylist()
    first = offsets[0] if offsets else 0
    inner = values(array.values.slice(first, offsets[-1] - first if offsets else 0))
    return [inner[offsets[n] - first : offsets[n + 1] - first] for n in range(len(array))]


def _with_nulls(array: Any, found: list[Any]) -> list[Any]:
    if not array.null_count:
        return found
    return [None if null else value for value, null in zip(found, array.is_null().to_pylist(), strict=True)]
