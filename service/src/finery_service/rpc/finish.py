"""Finish: the attempt is over. Success must be proven, and what the customer asked for must have been asked for."""

from __future__ import annotations

import structlog
from pydantic import ValidationError
from sqlmodel import select

from finery.types.errors import ErrorDetail
from finery.types.jobs import Intent
from finery.types.reasons import RULES, JobReason
from finery_protos.v1 import worker_pb2 as pb
from finery_service.checkpoints.tables import CheckpointRow
from finery_service.jobs import attempts, states, store
from finery_service.jobs.tables import AttemptRow, JobRow
from finery_service.rpc import checks, fence
from finery_service.rpc.fence import Call

_MAX_ERROR = 16_384
_MAY_REPORT = frozenset(
    reason for reason, rule in RULES.items() if rule.final is not None and reason is not JobReason.TOO_MANY_FAULTS
) | {JobReason.PLATFORM_FAULT}
_SUCCESS = frozenset(reason for reason, rule in RULES.items() if rule.final == "succeeded")
_NEEDS_INTENT = {
    JobReason.CANCELLED_BY_CUSTOMER: Intent.CANCEL,
    JobReason.PAUSED_BY_CUSTOMER: Intent.PAUSE,
}

_log = structlog.get_logger(__name__)


async def finish(call: Call, request: pb.FinishRequest) -> pb.FinishResponse:
    """The last call. Success must be proven: all steps committed, and a final checkpoint of the last one."""
    reason, error = _check_finish(request)
    job, attempt = await fence.find(call, request.attempt_id, request.fence)
    if attempt.state == "ended" and attempt.reason == reason:
        return pb.FinishResponse()
    fence.must_run(job, attempt)
    if reason in _SUCCESS:
        await _prove_success(call, job, attempt, reason)
    if reason in _NEEDS_INTENT and not _was_asked_for(job, _NEEDS_INTENT[reason]):
        checks.not_now(f"reason: nobody asked for it: the intent of job {job.id} is {job.intent}")
    if reason is JobReason.PLATFORM_FAULT:
        _log.warning("attempt_fault", job=job.id, attempt=attempt.id, error=error.message if error else None)
    await end(call, job, attempt, reason, error)
    return pb.FinishResponse()


async def end(call: Call, job: JobRow, attempt: AttemptRow, reason: JobReason, error: ErrorDetail | None) -> None:
    """Ends the (live) attempt and settles what becomes of the job."""
    await attempts.end(call.session, job, attempt, reason=reason, now=call.now)
    database_now = await store.database_now(call.session)
    kind: states.AttemptKind = "prepare" if attempt.kind == "prepare" else "train"
    outcome = states.after_attempt(attempts.view(job), kind, reason, database_now)
    await attempts.settle(call.session, job, outcome, now=call.now, error=error if outcome.reason is reason else None)


def _check_finish(request: pb.FinishRequest) -> tuple[JobReason, ErrorDetail | None]:
    if request.reason not in _MAY_REPORT:
        checks.invalid(f"reason: expected one of {', '.join(sorted(_MAY_REPORT))}, found {request.reason[:80]!r}")
    if len(request.error_json) > _MAX_ERROR:
        checks.invalid(f"error_json: expected at most {_MAX_ERROR} characters, found {len(request.error_json)}")
    error = checks.json_object(request.error_json, "error_json")
    try:
        return JobReason(request.reason), ErrorDetail.model_validate(error) if error else None
    except ValidationError as problem:
        checks.invalid(f"error_json: expected an ErrorDetail, found a wrong {problem.errors()[0]['loc']}")


def _was_asked_for(job: JobRow, wanted: Intent) -> bool:
    # Resumed, or cancelled after all, while the worker was pausing: `states.after_attempt` says what follows.
    return job.intent == wanted or (wanted is Intent.PAUSE and job.intent_at is not None)


async def _prove_success(call: Call, job: JobRow, attempt: AttemptRow, reason: JobReason) -> None:
    if attempt.kind == "prepare":
        checks.not_now("reason: a prepare attempt completes with ReportPrepared")
    last = job.total_steps
    if reason is JobReason.STOPPED_EARLY:
        last = job.stopped_step
        if last is None:
            checks.not_now("reason: stopped_early needs a final checkpoint before the last step, found none")
    if last is None or attempt.step != last:
        checks.not_now(f"reason: {reason} needs all {last} steps committed, found {attempt.step}")
    statement = select(CheckpointRow.id).where(
        CheckpointRow.job_id == job.id, CheckpointRow.step == last, CheckpointRow.final
    )
    if (await call.session.exec(statement)).one_or_none() is None:
        checks.not_now(f"reason: {reason} needs a final checkpoint at step {last}, found none")
