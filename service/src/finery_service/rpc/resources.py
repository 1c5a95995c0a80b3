"""Lists of resources in a worker's message, as they are stored and shown."""

from __future__ import annotations

import json
from collections.abc import Sequence
from typing import Any

from pydantic import TypeAdapter, ValidationError

from finery.types.base import Resource
from finery_service.rpc import checks


def resources(name: str, given: str, kind: TypeAdapter[tuple[Any, ...]]) -> list[dict[str, Any]]:
    """`given`, the JSON in the field `name`, as the database holds it. Refuses what is no list of `kind`, and numbers
    that JSON does not have."""
    values = checks.json_array(given, name)
    try:
        found: Sequence[Resource] = kind.validate_python(values)
    except ValidationError as problem:
        first = problem.errors()[0]
        place = ".".join(map(str, first["loc"]))
        checks.invalid(f"{name}: expected a list as of finery.types, found a wrong {place}: {first['msg']}")
    shown = [one.model_dump(mode="json") for one in found]
    try:
        json.dumps(shown, allow_nan=False)
    except ValueError:
        checks.invalid(f"{name}: expected finite numbers, found one that is not")
    return shown
