"""Query parameters are as strict as bodies: a filter with a typo would quietly answer for everything."""

from __future__ import annotations

from collections import Counter
from typing import get_origin

from fastapi import Request
from fastapi.dependencies.models import Dependant
from fastapi.routing import APIRoute

from finery.data.strict_json import printable, shown
from finery_service.errors import ServiceError

MAX_PARAMETERS = 100
"""Of one request, repeated ones counted each time: no list takes nearly as many values."""


def known_parameters(request: Request) -> None:
    """Raises 400 for the first query parameter that the route does not have, or that is given twice and is no list."""
    if not request.scope["query_string"]:
        return
    route: APIRoute = request.scope["route"]
    known = _known(route.dependant)
    given = Counter(name for name, _ in request.query_params.multi_items())
    if given.total() > MAX_PARAMETERS:
        message = f"Expected at most {MAX_PARAMETERS} query parameters, found {given.total()}; ask for less at a time."
        raise ServiceError(400, "too_many_parameters", message)
    for name, count in given.items():
        if name not in known:
            expected = f"one of the query parameters {', '.join(sorted(known))}" if known else "no query parameters"
            message = f"Expected {expected}, found {shown(name)}."
            raise ServiceError(400, "unknown_parameter", message, param=printable(name))
        if count > 1 and not known[name]:
            message = f"{name}: expected it once, found it {count} times; which one is meant?"
            raise ServiceError(400, "repeated_parameter", message, param=name)


def _known(dependant: Dependant) -> dict[str, bool]:
    """Names, and whether they may be repeated."""
    known = {field.alias: get_origin(field.field_info.annotation) is list for field in dependant.query_params}
    for dependency in dependant.dependencies:
        known |= _known(dependency)
    return known
