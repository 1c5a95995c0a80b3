"""The calls that end something: the data is prepared, a checkpoint is stored, the attempt is over."""

from __future__ import annotations

from typing import Any

import structlog
from pydantic import ValidationError
from sqlmodel import select

from finery.types.errors import ErrorDetail
from finery.types.ids import new_id
from finery.types.jobs import Intent
from finery.types.reasons import RULES, JobReason
from finery_protos.v1 import worker_pb2 as pb
from finery_service.checkpoints.tables import CheckpointRow
from finery_service.clock import milliseconds
from finery_service.jobs import attempts, states, store
from finery_service.jobs.tables import AttemptRow, JobRow
from finery_service.rpc import checks, fence
from finery_service.rpc.begin import output_prefix
from finery_service.rpc.fence import Call
from finery_service.usage import ledger

_MAX_ERROR = 16_384
_POSITIVE = ("rows", "tokens", "trained_tokens", "total_steps", "total_trained_tokens")
_NOT_NEGATIVE = ("dropped_rows", "truncated_rows")
_COUNTS = _POSITIVE + _NOT_NEGATIVE
_MAY_REPORT = frozenset(
    reason for reason, rule in RULES.items() if rule.final is not None and reason is not JobReason.TOO_MANY_FAULTS
) | {JobReason.PLATFORM_FAULT}
_NEEDS_INTENT = {
    JobReason.CANCELLED_BY_CUSTOMER: Intent.CANCEL,
    JobReason.PAUSED_BY_CUSTOMER: Intent.PAUSE,
}

_log = structlog.get_logger(__name__)


async def report_prepared(call: Call, request: pb.ReportPreparedRequest) -> pb.Orders:
    """Ends the attempt and queues the job; Finish may follow and changes nothing."""
    statistics = _check_prepared(request)
    job, attempt = await fence.find(call, request.attempt_id, request.fence)
    if attempt.state == "ended" and attempt.kind == "prepare" and attempt.reason == JobReason.COMPLETED:
        return fence.orders(call, job.intent, 0)
    fence.must_run(job, attempt, "prepare")
    checks.key_below(request.prepared_prefix, output_prefix(attempt), "prepared_prefix")
    job.prepared_prefix = request.prepared_prefix
    job.total_steps = request.total_steps
    job.quote_tokens = request.total_trained_tokens
    data: dict[str, Any] = {name: getattr(request, name) for name in _COUNTS}
    if statistics:
        data["statistics"] = statistics
    await store.append_event(call.session, tenant=job.tenant_id, job=job.id, type="prepared", data=data, now=call.now)
    await _end(call, job, attempt, JobReason.COMPLETED, None)
    return fence.orders(call, job.intent, 0)


async def publish_checkpoint(call: Call, request: pb.PublishCheckpointRequest) -> pb.PublishCheckpointResponse:
    """The row that makes a checkpoint exist, under the fence; a step that has one keeps it."""
    manifest = _check_checkpoint(request)
    job, attempt = await fence.find(call, request.attempt_id, request.fence)
    fence.must_run(job, attempt, "train")
    for field in ("prefix", "resume_prefix"):
        checks.key_below(getattr(request, field), output_prefix(attempt), field)
    checkpoint_id = await _existing(call, job, request)
    if checkpoint_id is None:
        if request.step > attempt.step:
            checks.not_now(f"step: committed through {attempt.step}, found {request.step}: commit its steps first")
        if request.final != (request.step == job.total_steps):
            checks.not_now(f"final: expected it at step {job.total_steps} and only there, found step {request.step}")
        checkpoint_id = await _publish(call, job, attempt, request, manifest)
    return pb.PublishCheckpointResponse(checkpoint_id=checkpoint_id, orders=await fence.renew(call, job, attempt))


async def finish(call: Call, request: pb.FinishRequest) -> pb.FinishResponse:
    """The last call. Success must be proven: all steps committed, and a final checkpoint of the last one."""
    reason, error = _check_finish(request)
    job, attempt = await fence.find(call, request.attempt_id, request.fence)
    if attempt.state == "ended" and attempt.reason == reason:
        return pb.FinishResponse()
    fence.must_run(job, attempt)
    if reason is JobReason.COMPLETED:
        await _prove_completion(call, job, attempt)
    if reason in _NEEDS_INTENT and job.intent != _NEEDS_INTENT[reason]:
        checks.not_now(f"reason: nobody asked for it: the intent of job {job.id} is {job.intent}")
    if reason is JobReason.PLATFORM_FAULT:
        _log.warning("attempt_fault", job=job.id, attempt=attempt.id, error=error.message if error else None)
    await _end(call, job, attempt, reason, error)
    return pb.FinishResponse()


async def _end(call: Call, job: JobRow, attempt: AttemptRow, reason: JobReason, error: ErrorDetail | None) -> None:
    await attempts.end(call.session, job, attempt, reason=reason, now=call.now)
    database_now = await store.database_now(call.session)
    kind: states.AttemptKind = "prepare" if attempt.kind == "prepare" else "train"
    outcome = states.after_attempt(attempts.view(job), kind, reason, database_now)
    await attempts.settle(call.session, job, outcome, now=call.now, error=error if outcome.reason is reason else None)


def _check_prepared(request: pb.ReportPreparedRequest) -> dict[str, Any]:
    for name in _POSITIVE:
        if getattr(request, name) <= 0:
            checks.invalid(f"{name}: expected at least 1, found {getattr(request, name)}: finish with a reason instead")
    for name in _NOT_NEGATIVE:
        if getattr(request, name) < 0:
            checks.invalid(f"{name}: expected >= 0, found {getattr(request, name)}")
    if request.trained_tokens > request.tokens:
        checks.invalid(f"trained_tokens: expected at most tokens ({request.tokens}), found {request.trained_tokens}")
    if request.truncated_rows > request.rows:
        checks.invalid(f"truncated_rows: expected at most rows ({request.rows}), found {request.truncated_rows}")
    return checks.json_object(request.statistics_json, "statistics_json")


def _check_checkpoint(request: pb.PublishCheckpointRequest) -> dict[str, Any]:
    if request.step < 1:
        checks.invalid(f"step: expected at least 1, found {request.step}")
    if not request.files:
        checks.invalid("files: expected at least one, found none")
    seen: set[str] = set()
    for index, file in enumerate(request.files):
        if not checks.plain_path(file.path) or file.path in seen:
            checks.invalid(f"files[{index}].path: expected a relative path, each once, found {file.path[:200]!r}")
        if file.bytes < 0:
            checks.invalid(f"files[{index}].bytes: expected >= 0, found {file.bytes}")
        checks.sha256(file.sha256, f"files[{index}].sha256")
        seen.add(file.path)
    checks.sha256(request.resume_sha256, "resume_sha256")
    return checks.json_object(request.manifest_json, "manifest_json")


async def _existing(call: Call, job: JobRow, request: pb.PublishCheckpointRequest) -> str | None:
    statement = select(CheckpointRow.id).where(CheckpointRow.job_id == job.id, CheckpointRow.step == request.step)
    return (await call.session.exec(statement)).one_or_none()


async def _publish(
    call: Call, job: JobRow, attempt: AttemptRow, request: pb.PublishCheckpointRequest, manifest: dict[str, Any]
) -> str:
    row = CheckpointRow(
        tenant_id=job.tenant_id,
        id=new_id("ckpt", milliseconds(call.now)),
        job_id=job.id,
        project_id=job.project_id,
        attempt_id=attempt.id,
        step=request.step,
        final=request.final,
        prefix=request.prefix,
        files=[{"path": file.path, "bytes": file.bytes, "sha256": file.sha256} for file in request.files],
        bytes=sum(file.bytes for file in request.files),
        manifest=manifest,
        resume_prefix=request.resume_prefix,
        resume_sha256=request.resume_sha256,
        created_at=call.now,
    )
    call.session.add(row)
    await call.session.flush()
    await ledger.make_billable(call.session, job.id, through_step=row.step)
    job.last_checkpoint_id = row.id  # steps only grow: an existing one was answered before
    job.faults = {}  # the retry budget counts faults without progress
    await call.session.flush()
    data = {"checkpoint": row.id, "step": row.step, "final": row.final}
    await store.append_event(call.session, tenant=job.tenant_id, job=job.id, type="checkpoint", data=data, now=call.now)
    return row.id


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


async def _prove_completion(call: Call, job: JobRow, attempt: AttemptRow) -> None:
    if attempt.kind == "prepare":
        checks.not_now("reason: a prepare attempt completes with ReportPrepared")
    if job.total_steps is None or attempt.step != job.total_steps:
        checks.not_now(f"reason: completed needs all {job.total_steps} steps committed, found {attempt.step}")
    statement = select(CheckpointRow.final).where(
        CheckpointRow.job_id == job.id, CheckpointRow.step == job.total_steps, CheckpointRow.final
    )
    if (await call.session.exec(statement)).one_or_none() is None:
        checks.not_now(f"reason: completed needs a final checkpoint at step {job.total_steps}, found none")
