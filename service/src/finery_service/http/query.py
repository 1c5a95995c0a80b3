"""Query parameters are as strict as bodies: a filter with a typo would quietly answer for everything."""

from __future__ import annotations

from fastapi import Request
from fastapi.dependencies.models import Dependant
from fastapi.routing import APIRoute

from finery.data.strict_json import printable, shown
from finery_service.errors import ServiceError


def known_parameters(request: Request) -> None:
    """Raises 400 for the first query parameter that the route does not have."""
    if not request.scope["query_string"]:
        return
    route: APIRoute = request.scope["route"]
    known = _names(route.dependant)
    for name in request.query_params:
        if name not in known:
            expected = f"one of the query parameters {', '.join(sorted(known))}" if known else "no query parameters"
            message = f"Expected {expected}, found {shown(name)}."
            raise ServiceError(400, "unknown_parameter", message, param=printable(name))


def _names(dependant: Dependant) -> set[str]:
    return {field.alias for field in dependant.query_params}.union(*map(_names, dependant.dependencies))
