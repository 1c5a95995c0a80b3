"""The outermost layer: request id, log line, metrics, and the last net under errors."""

from __future__ import annotations

import re
import time
import traceback

import structlog
from starlette.requests import ClientDisconnect
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from finery.types.ids import new_id
from finery_service.clock import Clock, milliseconds
from finery_service.http.answers import error_response, internal_error
from finery_service.http.metrics import Metrics

_SANE_ID = re.compile(rb"[A-Za-z0-9._-]{1,128}")
_CLIENT_GONE = 499  # nginx's number; it is only logged and counted, nobody is left to read it

log = structlog.get_logger("finery.api")


class Edge:
    """ASGI middleware. Every answer carries `x-request-id`: the client's own if it sent a sane one."""

    def __init__(self, app: ASGIApp, *, clock: Clock, metrics: Metrics) -> None:
        self._app, self._clock, self._metrics = app, clock, metrics

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            await self._app(scope, receive, send)
            return
        request_id = self._request_id(scope)
        is_head = scope["method"] == "HEAD"
        inner = _as_get(scope) if is_head else scope
        status = _CLIENT_GONE

        async def send_with_id(message: Message) -> None:
            nonlocal status
            if is_head and message["type"] == "http.response.body":
                await send({"type": "http.response.body"})
                raise ClientDisconnect  # whatever would follow: nobody reads it
            if message["type"] == "http.response.start":
                status = message["status"]
                message["headers"] = [*message.get("headers", []), (b"x-request-id", request_id.encode())]
            await send(message)

        start = time.perf_counter()
        with structlog.contextvars.bound_contextvars(request_id=request_id):
            try:
                await self._app(inner, receive, send_with_id)
            except ClientDisconnect:
                pass
            except Exception:
                # As text: structlog's own rendering may show local variables, and with them secrets.
                log.error("request failed", traceback=traceback.format_exc())
                if status != _CLIENT_GONE:
                    raise  # the answer has begun: the server must cut the connection
                await error_response(internal_error())(scope, receive, send_with_id)
            finally:
                self._record(scope["method"], inner, status, time.perf_counter() - start)

    def _request_id(self, scope: Scope) -> str:
        given = [value for name, value in scope["headers"] if name == b"x-request-id"]
        if len(given) == 1 and _SANE_ID.fullmatch(given[0]):
            sane: str = given[0].decode()
            return sane
        return new_id("req", milliseconds(self._clock()))

    def _record(self, method: str, scope: Scope, status: int, seconds: float) -> None:
        method = method if method in _METHODS else "other"
        route = getattr(scope.get("route"), "path", "none")  # the template: ids would make a label each
        self._metrics.requests.labels(method, route, str(status)).inc()
        self._metrics.seconds.labels(method, route).observe(seconds)
        log.info("request", method=method, route=route, status=status, seconds=round(seconds, 6))


def _as_get(scope: Scope) -> Scope:
    """HEAD answers as GET does, without the body (RFC 9110, 9.3.2); of events the list, as a stream has no end."""
    return {**scope, "method": "GET", "headers": [pair for pair in scope["headers"] if pair[0] != b"accept"]}


_METHODS = frozenset({"GET", "HEAD", "POST", "PUT", "PATCH", "DELETE", "OPTIONS"})
