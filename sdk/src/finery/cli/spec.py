"""From options of `finery jobs create` to the body of the call. Nothing is validated here: the server decides."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from finery.types.methods import SftJobCreate


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
    """`learning_rate=3e-4` sets a hyper-parameter; `adapter.rank=8` or `export_merged=true` any other field."""
    name, equals, text = assignment.partition("=")
    path = name.strip().split(".")
    if not equals or not all(path):
        raise ValueError(f"expected name=value, found {assignment!r}")
    is_hyper = len(path) == 1 and path[0] not in SftJobCreate.model_fields
    *parents, leaf = ["hyperparameters", *path] if is_hyper else path
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
