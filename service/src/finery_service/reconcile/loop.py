"""The reconciler: one asyncio loop that makes the pool and the database agree, level-triggered."""

from __future__ import annotations

import asyncio
import contextlib
import os
import secrets
import signal
import socket

import structlog
import uvloop

from finery_scheduler.core.plan import plan
from finery_service.db.engine import create_engine, transaction
from finery_service.previews import store as previews
from finery_service.reconcile import apply, audit, effects, lease
from finery_service.reconcile.context import Context
from finery_service.reconcile.snapshot import read, to_snapshot
from finery_service.settings import Settings, required

_log = structlog.get_logger(__name__)
_LONGEST_WAIT = 5.0
_KEEP_HOUSE_EVERY = 120
"""Ticks."""
_STOP_SECONDS = 5.0


def serve(settings: Settings) -> None:
    """Runs until SIGTERM or SIGINT. Workers go on undisturbed; the next reconciler takes them over."""
    uvloop.run(_serve(settings))


async def tick(context: Context) -> None:
    """One pass: observe, decide, apply. The pool is read before the database, so every worker it lists has its row."""
    pool = await context.pool()
    view = await read(context.engine)
    if await apply.lifecycle(context, view, pool):
        view = await read(context.engine)
    if pool.reachable and await effects.clean_up(context, view, pool):
        view = await read(context.engine)
    decided = plan(to_snapshot(view, pool))
    await apply.explain(context, decided, view, pool)
    if await apply.admit(context, decided):
        view = await read(context.engine)
    if pool.reachable:
        await effects.launch_due(context, view)


async def run(context: Context, stop: asyncio.Event) -> None:
    """Leads whenever it can and ticks while it leads, until `stop` is set."""
    holder = f"{socket.gethostname()}:{os.getpid()}:{secrets.token_hex(8)}"
    leading = asyncio.create_task(_lead(context, holder, stop))
    ticking = asyncio.create_task(_tick_on(context, stop))
    try:
        await stop.wait()
        await asyncio.wait([ticking], timeout=_STOP_SECONDS)
    finally:
        tasks = [
            task for task in (ticking, leading, context.observing, *context.under_way.values()) if task is not None
        ]
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
        if context.leadership is not None:
            with contextlib.suppress(Exception):
                await lease.release(context.engine, context.leadership)


async def _lead(context: Context, holder: str, stop: asyncio.Event) -> None:
    seconds = context.settings.leader_seconds
    while not stop.is_set():
        before = context.leadership
        try:
            context.leadership = await lease.acquire(context.engine, holder, seconds)
        except Exception as problem:  # the epoch guards every apply, so an unsure leader does no harm
            _log.warning("leader_lease_not_renewed", error=type(problem).__name__)
        if context.leadership != before:
            _log.info("leadership", epoch=context.leadership.epoch if context.leadership else None)
        await _pause(stop, seconds / 5)


async def _tick_on(context: Context, stop: asyncio.Event) -> None:
    failures = ticks = 0
    while not stop.is_set():
        try:
            if context.leadership is not None:
                await tick(context)
                ticks += 1
                if ticks % _KEEP_HOUSE_EVERY == 0:
                    await keep_house(context)
            failures = 0
        except lease.StaleLeaderError as stale:
            _log.info("stale_decision_dropped", reason=str(stale))
        except Exception:
            failures += 1
            _log.exception("tick_failed", failures=failures)
        wait = context.settings.reconcile_seconds
        await _pause(stop, min(wait * 2 ** min(failures, 10), max(wait, _LONGEST_WAIT)))


async def keep_house(context: Context) -> None:
    """Old previews and runs go; what is not as it must be is told to the log."""
    async with context.apply() as session:
        await previews.forget(session, context.clock())
    pool = await context.pool()
    async with transaction(context.engine) as session:
        for difference in await audit.differences(session, pool.nodes if pool.reachable else None):
            _log.error("audit_difference", difference=difference)


async def _pause(stop: asyncio.Event, seconds: float) -> None:
    with contextlib.suppress(TimeoutError):
        await asyncio.wait_for(stop.wait(), seconds)


async def _serve(settings: Settings) -> None:
    from finery_scheduler.backends.ray import RayBackend

    stop = asyncio.Event()
    for number in (signal.SIGTERM, signal.SIGINT):
        asyncio.get_running_loop().add_signal_handler(number, stop.set)
    engine = create_engine(required(settings.system_dsn, "FINERY_SYSTEM_DSN"))
    backend = RayBackend(settings.ray_address, required(settings.ray_token, "FINERY_RAY_TOKEN"))
    try:
        await run(Context(engine, backend, settings), stop)
    finally:
        await backend.close()
        await engine.dispose()
