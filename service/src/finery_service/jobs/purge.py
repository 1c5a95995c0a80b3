"""Prepared data of jobs that have ended: every row of a customer's file is in it, and nobody reads it again; nor does
anybody the log-probs of pairs under the reference, which a DPO job's training kept with them.

It goes with a sweep soon after the job's end, so that a file that is deleted for good does not live on in it.
"""

from __future__ import annotations

import structlog
from obstore.store import ObjectStore
from sqlalchemy import text
from sqlalchemy.ext.asyncio import AsyncEngine

from finery_service.db.engine import transaction
from finery_service.objects import delete_below

# Of jobs of which nothing is left in the pool: a worker may still read. `jobs_with_data` serves it.
_DUE = text("""
    select job.id, array(
        select job.tenant_id || '/jobs/' || job.id || '/' || attempt.id
            || case attempt.kind when 'train' then '/reference' else '' end
        from attempts attempt
        where attempt.job_id = job.id and (attempt.kind = 'prepare' or job.method = 'dpo')
    )
    from jobs job
    where job.finished_at is not null and job.prepared_prefix is not null
      and not exists (select from attempts where job_id = job.id and cleaned_at is null)
    order by job.finished_at limit 100
""")
_DONE = text("update jobs set prepared_prefix = null where id = :job and finished_at is not null")

_log = structlog.get_logger("finery.api.jobs")


async def sweep(engine: AsyncEngine, store: ObjectStore) -> int:
    """Deletes what prepare attempts have stored, of some jobs that have ended; returns of how many.

    `engine` connects as finery_system.
    """
    async with transaction(engine) as session:
        due = (await session.execute(_DUE)).all()
    return sum([await _purge(engine, store, job, prefixes) for job, prefixes in due])


async def _purge(engine: AsyncEngine, store: ObjectStore, job: str, prefixes: list[str]) -> bool:
    """Failing is only logged: the row still says what is there."""
    try:
        for prefix in prefixes:
            await delete_below(store, prefix)
        async with transaction(engine) as session:
            await session.execute(_DONE, {"job": job})
    except Exception as problem:  # whatever a store or a database may raise
        _log.warning("prepared_data_not_purged", job=job, error=type(problem).__name__)
        return False
    return True
