"""The REST API: `create_app` puts it together, `serve` runs it until it is told to stop."""

from __future__ import annotations

import asyncio
import signal
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager, nullcontext
from typing import Any

import structlog
import uvicorn
import uvloop
from fastapi import Depends, FastAPI
from obstore.store import ObjectStore, from_url
from sqlalchemy.ext.asyncio import AsyncEngine

from finery.types.environments import EnvironmentCreate, EnvironmentRunCreate
from finery.types.methods import DpoJobCreate, JobUpdate, RlJobCreate, SftJobCreate
from finery.types.models import ModelCreate
from finery.types.previews import PreviewCreate
from finery.types.tenants import KeyCreate, TenantCreate
from finery_service.checkpoints.routes import router as checkpoints
from finery_service.clock import Clock, system_clock
from finery_service.db.engine import create_engine
from finery_service.db.notify import EventFeeds
from finery_service.environments.routes import router as environments
from finery_service.files.routes import router as files
from finery_service.housekeeping import keep_house
from finery_service.http.answers import install_handlers
from finery_service.http.context import Services
from finery_service.http.edge import Edge
from finery_service.http.health import router as health
from finery_service.http.metrics import Metrics
from finery_service.http.openapi_page import install_openapi
from finery_service.http.query import known_parameters
from finery_service.jobs import stream
from finery_service.jobs.routes import router as jobs
from finery_service.keys.routes import router as keys
from finery_service.models.routes import router as models
from finery_service.previews.routes import router as previews
from finery_service.rollouts.routes import router as rollouts
from finery_service.settings import Settings, required
from finery_service.tenants.routes import router as tenants
from finery_service.usage.routes import router as usage

_GRACE_SECONDS = 10
_CONNECTIONS = 20  # beyond these, connections are made anew for each use, which costs more than the use
# A megabyte of "key" still gets an answer; cutting a client off while it sends, it would see a broken connection.
_MAX_HEADER_BYTES = 2**20 + 2**18
_DESCRIPTION = "Post-training as a service: SFT, DPO and RL jobs, metered to the token, down to the checkpoint."
_BODIES = (
    SftJobCreate,
    DpoJobCreate,
    RlJobCreate,
    JobUpdate,
    PreviewCreate,
    EnvironmentCreate,
    EnvironmentRunCreate,
    ModelCreate,
    TenantCreate,
    KeyCreate,
)

log = structlog.get_logger("finery.api")


def create_app(
    settings: Settings,
    *,
    app_engine: AsyncEngine,
    system_engine: AsyncEngine,
    store: ObjectStore,
    clock: Clock = system_clock,
) -> FastAPI:
    """The API on these engines (finery_app, finery_system) and this store, whose owner closes them."""
    metrics = Metrics()
    feeds = EventFeeds(system_engine, stream.encode)

    @asynccontextmanager
    async def lifespan(_app: FastAPI) -> AsyncIterator[None]:
        sweeping = asyncio.create_task(keep_house(app.state.services))
        yield
        sweeping.cancel()
        await feeds.close()

    app = FastAPI(
        title="Finery",
        version="1",
        description=_DESCRIPTION,
        lifespan=lifespan,
        redirect_slashes=False,
        docs_url=None,  # they load scripts from a foreign host
        redoc_url=None,
    )
    app.state.services = Services(settings, app_engine, system_engine, store, clock, feeds, metrics)
    app.add_middleware(Edge, clock=clock, metrics=metrics)
    routers = (files, previews, environments, models, jobs, rollouts, checkpoints, usage, tenants, keys)
    install_handlers(app, (*routers, health))
    for router in routers:
        app.include_router(router, dependencies=[Depends(known_parameters)])
    app.include_router(health)
    install_openapi(app, _BODIES)
    return app


def serve(settings: Settings) -> None:
    """Serve until SIGTERM or SIGINT: event streams end at once, running requests get a few seconds."""
    uvloop.run(_serve(settings))


async def _serve(settings: Settings) -> None:
    app_engine = create_engine(required(settings.app_dsn, "FINERY_APP_DSN"), pool_size=_CONNECTIONS)
    system_engine = create_engine(required(settings.system_dsn, "FINERY_SYSTEM_DSN"))
    store: Any = from_url(settings.store_url)
    app = create_app(settings, app_engine=app_engine, system_engine=system_engine, store=store)
    try:
        await run_server(app, settings)
    finally:
        await app_engine.dispose()
        await system_engine.dispose()


async def run_server(app: FastAPI, settings: Settings) -> None:
    config = uvicorn.Config(
        app,
        host=settings.api_host,
        port=settings.api_port,
        http="h11",
        h11_max_incomplete_event_size=_MAX_HEADER_BYTES,
        ws="none",
        log_config=None,
        access_log=False,
        server_header=False,
        timeout_graceful_shutdown=_GRACE_SECONDS,
    )
    server = uvicorn.Server(config)
    loop = asyncio.get_running_loop()

    def stop() -> None:
        log.info("stopping")
        server.should_exit = True
        # Before the server waits for its connections: an event stream ends only when it is told to.
        stopping.append(loop.create_task(app.state.services.feeds.close()))

    stopping: list[asyncio.Task[None]] = []
    # uvicorn's own handlers do not know of the streams, and raise the signal again at the end.
    server.capture_signals = nullcontext  # type: ignore[assignment, method-assign]
    for number in (signal.SIGTERM, signal.SIGINT):
        loop.add_signal_handler(number, stop)
    await server.serve()
