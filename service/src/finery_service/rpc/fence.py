"""The fence: every call of a worker finds its attempt live, under its own number, or changes nothing."""

from __future__ import annotations

from dataclasses import dataclass
from datetime import datetime, timedelta

from sqlalchemy import text
from sqlmodel import select
from sqlmodel.ext.asyncio.session import AsyncSession

from finery.types.jobs import Intent
from finery_protos.v1 import worker_pb2 as pb
from finery_service.jobs import store
from finery_service.jobs.tables import AttemptRow, JobRow
from finery_service.rpc import checks
from finery_service.settings import Settings

INTENTS = {Intent.RUN: pb.INTENT_RUN, Intent.PAUSE: pb.INTENT_PAUSE, Intent.CANCEL: pb.INTENT_CANCEL}

# One row, no lock on the job: a heartbeat never waits for a commit.
_HEARTBEAT = text("""
    update attempts a
    set lease_expires_at = clock_timestamp() + make_interval(secs => :lease),
        granted_through = case when j.intent = 'run'
            then greatest(a.granted_through, least(a.step + :grant, coalesce(j.stopped_step, j.total_steps, 0)))
            else a.granted_through end
    from jobs j
    where j.tenant_id = a.tenant_id and j.id = a.job_id and a.id = :attempt and a.fence = :fence
      and j.fence = a.fence and a.state = 'running'
    returning j.intent, a.granted_through
""")


@dataclass(frozen=True, slots=True)
class Call:
    """One call: one transaction."""

    session: AsyncSession
    settings: Settings
    now: datetime


async def find(call: Call, attempt_id: str, fence: int) -> tuple[JobRow, AttemptRow]:
    """The attempt and its job, both locked, job first. It may have ended: see `must_live`."""
    job_id = (await call.session.exec(select(AttemptRow.job_id).where(AttemptRow.id == attempt_id))).one_or_none()
    job = await store.lock(call.session, job_id) if job_id is not None else None
    statement = select(AttemptRow).where(AttemptRow.id == attempt_id).with_for_update()
    attempt = (await call.session.exec(statement, execution_options={"populate_existing": True})).one_or_none()
    if job is None or attempt is None or attempt.fence != fence:
        checks.fenced_off(f"no attempt {attempt_id[:80]} under fence {fence}: stop")
    return job, attempt


def must_live(job: JobRow, attempt: AttemptRow) -> None:
    if attempt.state == "ended" or job.fence != attempt.fence:
        checks.fenced_off(f"attempt {attempt.id} has ended ({attempt.reason}): stop, write nothing more")


def must_run(job: JobRow, attempt: AttemptRow, kind: str | None = None) -> None:
    """For calls that come after Begin, and of a `kind` attempt only."""
    must_live(job, attempt)
    if attempt.state != "running":
        checks.not_now(f"expected Begin first, found attempt {attempt.id} still {attempt.state}")
    if kind not in (None, attempt.kind):
        checks.not_now(f"expected a {kind} attempt, found {attempt.kind} attempt {attempt.id}")


async def renew(call: Call, job: JobRow, attempt: AttemptRow) -> pb.Orders:
    """Renews the lease by the database's clock, grants steps, and returns the orders."""
    lease = timedelta(seconds=call.settings.lease_seconds)
    attempt.lease_expires_at = await store.database_now(call.session) + lease
    if attempt.kind == "train" and job.intent == Intent.RUN:
        last = job.total_steps if job.stopped_step is None else job.stopped_step
        grant = min(attempt.step + call.settings.grant_steps, last or 0)
        attempt.granted_through = max(attempt.granted_through, grant)
    return orders(call, job.intent, attempt.granted_through)


def orders(call: Call, intent: str, granted_through: int) -> pb.Orders:
    return pb.Orders(
        intent=INTENTS[Intent(intent)],
        granted_through=granted_through,
        lease_seconds=call.settings.lease_seconds,
    )


async def heartbeat(call: Call, request: pb.HeartbeatRequest) -> pb.Orders:
    arguments = {
        "attempt": request.attempt_id,
        "fence": request.fence,
        "lease": call.settings.lease_seconds,
        "grant": call.settings.grant_steps,
    }
    row = (await call.session.execute(_HEARTBEAT, arguments)).one_or_none()
    if row is None:
        checks.fenced_off(f"attempt {request.attempt_id[:80]} is not running under fence {request.fence}: stop")
    return orders(call, row.intent, row.granted_through)
