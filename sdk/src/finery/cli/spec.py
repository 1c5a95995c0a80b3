"""From options of `create` commands to the body of the call. Nothing is validated here: the server decides."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from finery.types.methods import DpoJobCreate, RlJobCreate, SftJobCreate

_FIELDS = frozenset(SftJobCreate.model_fields) | set(DpoJobCreate.model_fields) | set(RlJobCreate.model_fields)


def load(path: Path) -> dict[str, Any]:
    """A spec from a JSON file. Raises ValueError with the place of the fault."""
    try:
        spec = json.loads(path.read_text(encoding="utf-8"))
    except (UnicodeDecodeError, json.JSONDecodeError) as error:
        raise ValueError(f"{path}: expected a JSON object: {error}") from None
    if not isinstance(spec, dict):
        raise ValueError(f"{path}: expected a JSON object, found {type(spec).__name__}")
    return spec


def assign(spec: dict[str, Any], assignment: str) -> None:
    """For jobs: `learning_rate=3e-4` sets a hyper-parameter; `adapter.rank=8` or `seed=1` any other field."""
    path, text = _parts(assignment)
    is_hyper = len(path) == 1 and path[0] not in _FIELDS
    _set(spec, ["hyperparameters", *path] if is_hyper else path, text, assignment)


def put(spec: dict[str, Any], assignment: str) -> None:
    """`seed=1` sets a field, `config.min_terms=2` one of an object."""
    path, text = _parts(assignment)
    _set(spec, path, text, assignment)


def _parts(assignment: str) -> tuple[list[str], str]:
    name, equals, text = assignment.partition("=")
    path = name.strip().split(".")
    if not equals or not all(path):
        raise ValueError(f"expected name=value, found {assignment!r}")
    return path, text


def _set(spec: dict[str, Any], path: list[str], text: str, assignment: str) -> None:
    *parents, leaf = path
    place = spec
    for parent in parents:
        place = place.setdefault(parent, {})
        if not isinstance(place, dict):
            raise ValueError(f"{assignment!r}: {parent} is not an object in the spec")
    place[leaf] = value(text)


def value(text: str) -> Any:
    """JSON if it is JSON, else the text itself. NaN and Infinity are not JSON."""
    try:
        return json.loads(text, parse_constant=_refuse)
    except ValueError:
        return text


def _refuse(name: str) -> Any:
    raise ValueError(name)
