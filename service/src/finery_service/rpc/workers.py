"""What workers call. Each call is checked, authenticated, and one transaction; the answer leaves after its commit."""

from __future__ import annotations

from collections.abc import Awaitable, Callable
from typing import Any, Protocol, TypeVar

import grpc
import structlog
from grpc.aio import ServicerContext
from sqlalchemy.exc import InterfaceError, InternalError, OperationalError
from sqlalchemy.exc import TimeoutError as PoolTimeoutError
from sqlalchemy.ext.asyncio import AsyncEngine

from finery_protos.v1 import worker_pb2 as pb
from finery_protos.v1.worker_pb2_grpc import WorkersServicer
from finery_service.clock import Clock
from finery_service.db.engine import transaction
from finery_service.rpc import checks, fence, tokens
from finery_service.rpc.begin import begin
from finery_service.rpc.environment_runs import report_environment_run
from finery_service.rpc.fence import Call
from finery_service.rpc.finish import finish
from finery_service.rpc.prepared import report_prepared
from finery_service.rpc.previews import report_preview
from finery_service.rpc.publish import publish_checkpoint
from finery_service.rpc.steps import commit_steps
from finery_service.settings import Settings, required

_log = structlog.get_logger(__name__)
_DATABASE_AWAY = (OperationalError, InterfaceError, InternalError, PoolTimeoutError, ConnectionError)
"""The database restarts, chose us in a deadlock, or gave up on us while we were frozen: nothing was written, the worker
tries again."""


class _Request(Protocol):
    """Every request names its attempt."""

    @property
    def attempt_id(self) -> str: ...
    @property
    def fence(self) -> int: ...


Q = TypeVar("Q", bound=_Request)
A = TypeVar("A")
Context = ServicerContext[Any, Any]


class Workers(WorkersServicer):
    """`engine` connects as finery_system."""

    def __init__(self, engine: AsyncEngine, settings: Settings, clock: Clock) -> None:
        self._engine, self._settings, self._clock = engine, settings, clock
        self._secret = required(settings.worker_secret, "FINERY_WORKER_SECRET")

    async def Begin(self, request: pb.BeginRequest, context: Context) -> pb.Assignment:  # noqa: N802
        return await self._answer(begin, request, context)

    async def Heartbeat(self, request: pb.HeartbeatRequest, context: Context) -> pb.Orders:  # noqa: N802
        return await self._answer(fence.heartbeat, request, context)

    async def ReportPrepared(self, request: pb.ReportPreparedRequest, context: Context) -> pb.Orders:  # noqa: N802
        return await self._answer(report_prepared, request, context)

    async def ReportPreview(self, request: pb.ReportPreviewRequest, context: Context) -> pb.Orders:  # noqa: N802
        return await self._answer(report_preview, request, context)

    async def ReportEnvironmentRun(  # noqa: N802
        self, request: pb.ReportEnvironmentRunRequest, context: Context
    ) -> pb.Orders:
        return await self._answer(report_environment_run, request, context)

    async def CommitSteps(self, request: pb.CommitStepsRequest, context: Context) -> pb.Orders:  # noqa: N802
        return await self._answer(commit_steps, request, context)

    async def PublishCheckpoint(  # noqa: N802
        self, request: pb.PublishCheckpointRequest, context: Context
    ) -> pb.PublishCheckpointResponse:
        return await self._answer(publish_checkpoint, request, context)

    async def Finish(self, request: pb.FinishRequest, context: Context) -> pb.FinishResponse:  # noqa: N802
        return await self._answer(finish, request, context)

    async def _answer(self, handler: Callable[[Call, Q], Awaitable[A]], request: Q, context: Context) -> A:
        try:
            self._authenticate(request, context)
            return await self._transact(handler, request)
        except checks.Refused as refused:
            code, message = refused.code, refused.message
        except _DATABASE_AWAY as problem:
            _log.warning("worker_call_database", call=handler.__name__, error=type(problem).__name__)
            code, message = grpc.StatusCode.UNAVAILABLE, "the database does not answer; try again"
        except Exception:
            _log.exception("worker_call_failed", call=handler.__name__, attempt=request.attempt_id[:80])
            code, message = grpc.StatusCode.INTERNAL, "a fault on our side; the log has it"
        await context.abort(code, message)
        raise AssertionError("abort raises")

    def _authenticate(self, request: _Request, context: Context) -> None:
        metadata: dict[str, Any] = dict(context.invocation_metadata() or ())
        if not tokens.authentic(metadata.get("authorization"), self._secret, request.attempt_id, request.fence):
            message = "expected `authorization: Bearer <token of this attempt and fence>`"
            raise checks.Refused(grpc.StatusCode.UNAUTHENTICATED, message)

    async def _transact(self, handler: Callable[[Call, Q], Awaitable[A]], request: Q) -> A:
        checks.no_unknown_fields(request)  # type: ignore[arg-type]  # every request is a protobuf message
        async with transaction(self._engine) as session:
            return await handler(Call(session, self._settings, self._clock()), request)
