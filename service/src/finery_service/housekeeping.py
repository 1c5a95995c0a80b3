"""What an API process clears away now and then. Every sweep may run in several processes at once."""

from __future__ import annotations

import asyncio
from datetime import timedelta

import structlog

from finery_service.auth import store as auth
from finery_service.checkpoints import purge as checkpoints
from finery_service.db.engine import transaction
from finery_service.files import intake
from finery_service.files import purge as files
from finery_service.files.service import UPLOADS
from finery_service.http.context import Services
from finery_service.jobs import purge as jobs

IDEMPOTENCY_KEYS_KEPT = timedelta(days=7)
_UPLOAD_AGE = timedelta(days=1)
_FIRST, _EVERY = 30.0, 600.0

log = structlog.get_logger("finery.api")


async def sweep(services: Services) -> None:
    """Once: objects of deleted checkpoints and files, prepared data of jobs that have ended, idempotency keys that
    nobody repeats any more, and what uploads left whose process died."""
    await checkpoints.sweep(services.system_engine, services.store)
    await files.sweep(services.system_engine, services.store)
    await jobs.sweep(services.system_engine, services.store)
    async with transaction(services.system_engine) as session:
        await auth.forget(session, before=services.clock() - IDEMPOTENCY_KEYS_KEPT)
    await intake.sweep(services.store, UPLOADS, services.clock() - _UPLOAD_AGE)


async def keep_house(services: Services) -> None:
    """`sweep` for ever. What fails is tried again the next time."""
    wait = _FIRST
    while True:
        await asyncio.sleep(wait)
        try:
            await sweep(services)
        except Exception as problem:  # whatever a store or a database may raise
            log.warning("sweep_failed", error=type(problem).__name__)
        wait = _EVERY
