"""`Idempotency-Key`: a request that is repeated is done once.

The key's row is committed in the same transaction as the object, so there is never one without the other. While a
request is running its transaction holds two advisory locks, on (scope, key) and on (scope, key, request): from which
of them are busy a second request knows whether its twin is at work (409, try again) or the key is misused (422).
"""

from __future__ import annotations

import json
import re
from collections.abc import Awaitable, Callable
from dataclasses import dataclass
from datetime import datetime
from typing import TypeVar

from fastapi import Request, Response
from sqlmodel.ext.asyncio.session import AsyncSession

from finery.data.strict_json import canonical_sha256
from finery.types.base import Resource
from finery_service.auth import store
from finery_service.auth.tables import IdempotencyRow
from finery_service.errors import ServiceError
from finery_service.http.answers import answer

R = TypeVar("R", bound=Resource)

OPERATOR_SCOPE = "operator"
HEADER = "idempotency-key"

_KEY = re.compile(r"[\x21-\x7e]{1,255}")


@dataclass(frozen=True)
class Once:
    """A request that must not be done twice."""

    scope: str
    """The tenant's id, or `operator`."""
    key: str | None
    route: str
    body_sha256: str

    @property
    def fingerprint(self) -> str:
        return f"{self.route} {self.body_sha256}"


def once_of(request: Request, scope: str, body_sha256: str) -> Once:
    """Raises 400 for a malformed or repeated header. Without one nothing is remembered."""
    keys = request.headers.getlist(HEADER)
    if len(keys) > 1 or (keys and not _KEY.fullmatch(keys[0])):
        message = "Expected one Idempotency-Key of 1 to 255 visible ASCII characters, found another one."
        raise ServiceError(400, "invalid_idempotency_key", message, param=HEADER)
    return Once(scope, keys[0] if keys else None, f"{request.method} {request.url.path}", body_sha256)


def fingerprint_of(*parts: str) -> str:
    """Stands in for the body's digest where the body is no JSON."""
    return canonical_sha256(parts)


async def replay(session: AsyncSession, once: Once) -> Response | None:
    """The answer that this request got before, or None if it is ours to do, in this transaction.

    Raises 422 if the key was used for, or is being used by, another request, 409 if a twin is still running.
    """
    if once.key is None:
        return None
    turn = await store.take_turn(session, once.scope, once.key, once.fingerprint)
    if turn == "twin":
        message = "A request with this Idempotency-Key is still running; repeat it in a second."
        raise ServiceError(409, "request_in_progress", message, param=HEADER, headers={"retry-after": "1"})
    if turn == "other":
        raise _reused()
    row = await store.answered(session, once.scope, once.key)
    if row is None:
        return None
    if (row.route, row.body_sha256) != (once.route, once.body_sha256):
        raise _reused()
    headers = {"idempotent-replayed": "true"}
    return Response(json.dumps(row.response), row.status, headers, media_type="application/json")


async def do_once(
    session: AsyncSession,
    once: Once,
    create: Callable[[], Awaitable[R]],
    now: datetime,
    *,
    remember: Callable[[R], R] = lambda resource: resource,
) -> Response:
    """201 with what `create` made, or the answer of before. `remember` takes out what must not be stored."""
    before = await replay(session, once)
    if before is not None:
        return before
    resource = await create()
    if once.key is not None:
        row = IdempotencyRow(
            tenant_id=once.scope,
            key=once.key,
            route=once.route,
            body_sha256=once.body_sha256,
            status=201,
            response=remember(resource).model_dump(mode="json"),
            created_at=now,
        )
        session.add(row)
    return answer(resource, 201)


def _reused() -> ServiceError:
    message = "Expected a fresh Idempotency-Key, found one that was used for another request; use a new one."
    headers = {"x-should-retry": "false"}
    return ServiceError(422, "idempotency_key_reused", message, param=HEADER, headers=headers)
