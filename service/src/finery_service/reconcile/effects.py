"""Decisions into the pool: launches and stops, outside any transaction, each idempotent by attempt id."""

from __future__ import annotations

import asyncio
import json
from collections.abc import Awaitable, Callable, Collection, Mapping
from functools import partial

import structlog

from finery_scheduler.backend import Launch, LaunchError, PoolUnreachableError
from finery_service.jobs.tables import AttemptRow
from finery_service.reconcile import apply
from finery_service.reconcile.context import Context
from finery_service.reconcile.snapshot import Pool, View, judges, placements
from finery_service.rpc.tokens import attempt_token
from finery_service.settings import required

ENTRYPOINT = "finery_gpu_workers.run:main"
_AT_ONCE = 8
_MOMENT = 1.0
"""What takes longer goes on in the background: leases and cancellations of other jobs do not wait for it."""
_SECONDS = 150.0
"""The backend has limits of its own; one call beyond this one counts as unreachable and is made again."""

_log = structlog.get_logger(__name__)


async def launch_due(context: Context, view: View) -> None:
    """Attempts whose launch the pool has not confirmed; after a restart of ours they are launched again."""
    due = [attempt for attempt in view.live.values() if attempt.launched_at is None]
    begun = [attempt.id for attempt in due if attempt.state == "running"]
    await apply.launched(context, begun)
    waiting = [attempt for attempt in due if attempt.state == "starting"]
    asked = await judges(context.engine, [one.job_id for one in waiting]) if waiting else {}
    launches = {one.id: partial(_launch, context, one, asked.get(one.job_id, ())) for one in waiting}
    await _do(context, "launch", launches)


async def clean_up(context: Context, view: View, pool: Pool) -> bool:
    """Stops ended attempts until the pool confirms that nothing is left, and what the database does not know.

    The obligation is the row itself (`cleaned_at` null), so it outlives us. True if any slot came free.
    """
    known = {attempt.id for attempt in view.live.values()} | {attempt.id for attempt in view.uncleaned}
    orphans = sorted(set(pool.workers or {}) - known)
    # One that is still being launched is stopped afterwards: the pool does one thing at a time with an attempt.
    ended = [attempt.id for attempt in view.uncleaned if ("launch", attempt.id) not in context.under_way]
    due = [attempt_id for attempt_id in (*ended, *orphans) if context.patience.ready(attempt_id)]
    if any(orphan in due for orphan in orphans):
        _log.warning("orphans_in_pool", attempts=orphans)
    stopped = await _do(context, "stop", {attempt_id: partial(_stop, context, attempt_id) for attempt_id in due})
    if not stopped:
        return False
    try:
        left = {attempt for attempt, status in (await context.backend.workers()).items() if status != "dead"}
    except PoolUnreachableError:
        return False
    for attempt_id in stopped & left:
        context.patience.failed(attempt_id)
    confirmed = [attempt_id for attempt_id in ended if attempt_id in stopped - left]
    await apply.cleaned(context, confirmed)
    return bool(confirmed)


def launch(context: Context, attempt: AttemptRow, asked: Collection[str] = ()) -> Launch:
    """What the pool starts. The environment holds the attempt's token, and the keys of the model servers that are
    `asked` by its graders, of no others: never log it."""
    settings = context.settings
    secret = required(settings.worker_secret, "FINERY_WORKER_SECRET")
    environment = {
        "FINERY_RPC_ADDRESS": settings.rpc_address,
        "FINERY_ATTEMPT_ID": attempt.id,
        "FINERY_FENCE": str(attempt.fence),
        "FINERY_ATTEMPT_TOKEN": attempt_token(secret, attempt.id, attempt.fence),
        "FINERY_STORE_URL": settings.store_url,
        "FINERY_MODEL_CACHE": str(settings.model_cache),
        "FINERY_DEVICE": settings.device,
    }
    if settings.torch_threads is not None:
        environment["FINERY_TORCH_THREADS"] = str(settings.torch_threads)
    known = {url: key for url, key in settings.score_models.items() if url in asked}
    if known:
        keys = {url: key.get_secret_value() if key else None for url, key in known.items()}
        environment["FINERY_SCORE_MODELS"] = json.dumps(keys)
    return Launch(attempt.id, ENTRYPOINT, environment, placements(attempt.placements))


async def _launch(context: Context, attempt: AttemptRow, asked: Collection[str]) -> str | None:
    try:
        async with asyncio.timeout(_SECONDS):
            await context.backend.launch(launch(context, attempt, asked))
    except LaunchError as problem:
        _log.warning("launch_failed", attempt=attempt.id, job=attempt.job_id, error=str(problem))
        await apply.launch_failed(context, attempt)
        return None
    except (PoolUnreachableError, TimeoutError):
        _log.warning("launch_unconfirmed", attempt=attempt.id, job=attempt.job_id)
        return None
    await apply.launched(context, [attempt.id])
    _log.info("launched", attempt=attempt.id, job=attempt.job_id, kind=attempt.kind)
    return attempt.id


async def _stop(context: Context, attempt_id: str) -> str | None:
    try:
        async with asyncio.timeout(_SECONDS):
            await context.backend.stop(attempt_id)
    except Exception as problem:
        _log.warning("stop_failed", attempt=attempt_id, error=f"{type(problem).__name__}: {problem}")
        context.patience.failed(attempt_id)
        return None
    context.patience.succeeded(attempt_id)
    return attempt_id


async def _do(context: Context, kind: str, actions: Mapping[str, Callable[[], Awaitable[str | None]]]) -> set[str]:
    """Begins what is not under way yet, a few at a time, and waits a moment; returns what all that is over by now gave.

    The first error is raised once the others are noted.
    """
    at_once = context.at_once.setdefault(kind, asyncio.Semaphore(_AT_ONCE))

    async def one(action: Callable[[], Awaitable[str | None]]) -> str | None:
        async with at_once:
            return await action()

    under_way = context.under_way
    for item, action in actions.items():
        if (kind, item) not in under_way:
            under_way[kind, item] = asyncio.create_task(one(action))
    ours = {key: task for key, task in under_way.items() if key[0] == kind}
    if ours:
        await asyncio.wait(ours.values(), timeout=_MOMENT)
    over = [under_way.pop(key) for key, task in ours.items() if task.done()]
    results = await asyncio.gather(*over, return_exceptions=True)
    for result in results:
        if isinstance(result, BaseException):
            raise result
    return {result for result in results if isinstance(result, str)}
