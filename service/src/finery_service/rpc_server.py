"""The process that workers report to: grpc.aio under uvloop."""

from __future__ import annotations

import asyncio
import signal

import grpc
import structlog
import uvloop
from grpc_health.v1 import health, health_pb2_grpc
from sqlalchemy.ext.asyncio import AsyncEngine

from finery_protos.v1.worker_pb2_grpc import add_WorkersServicer_to_server
from finery_service.clock import Clock, system_clock
from finery_service.db.engine import create_engine
from finery_service.rpc.workers import Workers
from finery_service.settings import Settings, required

_log = structlog.get_logger(__name__)
_OPTIONS = (
    ("grpc.so_reuseport", 0),  # a second server on the port is an error, not a silent twin
    ("grpc.max_receive_message_length", 16 * 2**20),
)
_STOP_SECONDS = 5.0


def build(engine: AsyncEngine, settings: Settings, clock: Clock = system_clock) -> tuple[grpc.aio.Server, int]:
    """The server, not started, and the port that it is bound to (`rpc_port` 0: a free one)."""
    server = grpc.aio.server(options=_OPTIONS)
    add_WorkersServicer_to_server(Workers(engine, settings, clock), server)
    health_pb2_grpc.add_HealthServicer_to_server(health.aio.HealthServicer(), server)  # type: ignore[attr-defined]
    port = server.add_insecure_port(f"{settings.rpc_host}:{settings.rpc_port}")
    if port == 0:
        raise SystemExit(f"cannot listen on {settings.rpc_host}:{settings.rpc_port}: another process does")
    return server, port


def serve(settings: Settings) -> None:
    """Runs until SIGTERM or SIGINT; calls under way are finished first."""
    uvloop.run(_serve(settings))


async def _serve(settings: Settings) -> None:
    stop = asyncio.Event()
    for number in (signal.SIGTERM, signal.SIGINT):
        asyncio.get_running_loop().add_signal_handler(number, stop.set)
    engine = create_engine(required(settings.system_dsn, "FINERY_SYSTEM_DSN"))
    try:
        server, port = build(engine, settings)
        await server.start()
        _log.info("rpc_ready", host=settings.rpc_host, port=port)
        await stop.wait()
        await server.stop(_STOP_SECONDS)
    finally:
        await engine.dispose()
