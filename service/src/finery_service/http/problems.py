"""What pydantic finds wrong with a body, as one clear sentence for each field of it. Pure."""

from __future__ import annotations

import re
from collections import defaultdict
from collections.abc import Sequence
from typing import Any

from pydantic_core import ErrorDetails

from finery.data.strict_json import dotted

Problem = tuple[str | None, str, str]
"""Field, code, sentence."""

UNKNOWN = "unknown_field"
_CODES = {"missing": "missing_field", "extra_forbidden": UNKNOWN}
_WORDS = {
    "Input should be": "expected",
    "String should match pattern": "expected a text that matches",
    "String should have": "expected a text with",
    "Tuple should have": "expected a list with",
    "List should have": "expected a list with",
    "Dictionary should have": "expected an object with",
    "Field required": "expected this field, found nothing",
    "Extra inputs are not permitted": "expected no field of this name",
}
_TAGGED = ("union_tag_invalid", "union_tag_not_found", "adapter_type")
_KINDS = {
    "string_type": "a text",
    "dict_type": "an object",
    "model_type": "an object",
    "model_attributes_type": "an object",
    "tuple_type": "a list",
    "list_type": "a list",
}
"""Errors that only say that a value is of another kind; every other member of a union has one."""
_COUNT = re.compile(r" after validation, not (more|\d+)")
"""How pydantic ends what it says of too many or too few items."""
_ID = re.compile(r"\^([a-z]+_)\[")
"""The pattern of an id, as in `finery.types.ids`."""


def problems_of(errors: Sequence[ErrorDetails], body: Any, root_param: str | None) -> list[Problem]:
    """One for each field, in pydantic's order; of a union, only what is wrong with the member that was meant.

    `root_param` is named where the error is about several fields together.
    """
    by_field: dict[str | None, list[ErrorDetails]] = defaultdict(list)
    for error in errors:
        param = field_name(error["loc"], body, missing=error["type"] == "missing") or None
        if param is None and error["type"] == "value_error":
            param = root_param
        by_field[param].append(error)
    above = {param[:end] for param in by_field if param for end, c in enumerate(param) if c in ".["}
    told = {param: found for param, found in by_field.items() if param not in above}
    return [problem for param, found in told.items() for problem in _of_field(param, found)]


def _of_field(param: str | None, errors: Sequence[ErrorDetails]) -> list[Problem]:
    if param is None or len(errors) == 1:
        return [_problem(param, error) for error in errors]
    kinds = list(dict.fromkeys(_KINDS[error["type"]] for error in errors if error["type"] in _KINDS))
    sent = errors[0]["input"]
    others = [error for error in errors if error["type"] not in _KINDS]
    if isinstance(sent, (dict, list)):  # then no word was meant
        others.sort(key=lambda error: error["type"] == "literal_error")
    meant = next(iter(others), None)
    if meant is None:
        return [(param, "invalid_value", f"expected {' or '.join(kinds)}, found {found(sent)}")]
    code, sentence = _problem(param, meant)[1:]
    head, comma, tail = sentence.partition(", found")
    if kinds and comma and not isinstance(sent, (dict, list)):
        sentence = f"{head} or {' or '.join(kinds)}{comma}{tail}"
    return [(param, code, sentence)]


def _problem(param: str | None, error: ErrorDetails) -> Problem:
    kind = error["type"]
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
    if error["type"] == "union_tag_not_found":
        message = f"expected an object whose {error['ctx']['discriminator']} says what it is"
    if error["type"] == "string_pattern_mismatch" and (prefix := _ID.match(error["ctx"]["pattern"])):
        message = f"expected an id that begins with {prefix[1]}"
    if error["type"] in _KINDS:
        message = f"expected {_KINDS[error['type']]}"
    for theirs, ours in _WORDS.items():
        message = message.replace(theirs, ours)
    message = _COUNT.sub(r", found \1", message)
    sent = error["input"]
    if isinstance(sent, str):
        message = message.replace(repr(sent), found(sent))
    return message[:1].lower() + message[1:]


def field_name(loc: tuple[int | str, ...], body: Any, *, missing: bool) -> str:
    """pydantic's place as a field of `body`, without the names of union members that pydantic puts in."""
    path: list[int | str] = []
    tagged = False
    for place, part in enumerate(loc):
        is_last = place == len(loc) - 1
        if isinstance(body, dict) and not tagged and part == body.get("type") and not is_last:
            tagged = True  # the member of a union that `type` names, which may be the name of a field, too
        elif isinstance(body, dict) and isinstance(part, str) and (part in body or (missing and is_last)):
            path.append(part)
            body, tagged = body.get(part), False
        elif isinstance(body, list) and isinstance(part, int) and part < len(body):
            path.append(part)
            body, tagged = body[part], False
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
