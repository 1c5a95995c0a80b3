"""The field that somebody probably meant by a name that no field has."""

from __future__ import annotations

import re
from collections.abc import Iterator
from difflib import get_close_matches
from functools import cache
from typing import Any, get_args

from pydantic import BaseModel

_LONGEST = 64
"""Characters: comparing takes the square of them, and no field of ours is as long."""
_CLOSE_BESIDE, _CLOSE_ELSEWHERE = 0.6, 0.8
_INDEX = re.compile(r"\[\d+\]")


def meant(kind: type[BaseModel], param: str) -> str | None:
    """The closest name next to the unknown field `param`, or the dotted name of a field elsewhere in `kind`; or None.

    Only names of ours are answered, never what was sent.
    """
    parent, _, name = _INDEX.sub("", param).rpartition(".")
    if len(name) > _LONGEST:
        return None
    paths = _paths(kind) - {f"{parent}.{name}".lstrip(".")}
    beside = [path.rpartition(".")[2] for path in paths if path.rpartition(".")[0] == parent]
    if close := get_close_matches(name, sorted(beside), 1, _CLOSE_BESIDE):
        return close[0]
    elsewhere = {path.rpartition(".")[2]: path for path in sorted(paths)}
    found = get_close_matches(name, sorted(elsewhere), 1, _CLOSE_ELSEWHERE)
    return elsewhere[found[0]] if found else None


def has(kind: type[BaseModel], param: str) -> bool:
    """Whether `kind` has a field of this dotted name."""
    return _INDEX.sub("", param) in _paths(kind)


@cache
def _paths(kind: type[BaseModel]) -> frozenset[str]:
    """Dotted names of all fields, those of a union's members side by side."""
    found = set()
    for name, field in kind.model_fields.items():
        found.add(name)
        for inner in _models(field.annotation):
            found |= {f"{name}.{path}" for path in _paths(inner)}
    return frozenset(found)


def _models(annotation: Any) -> Iterator[type[BaseModel]]:
    if isinstance(annotation, type) and issubclass(annotation, BaseModel):
        yield annotation
    for part in get_args(annotation):
        yield from _models(part)
