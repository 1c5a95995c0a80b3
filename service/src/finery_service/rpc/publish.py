"""PublishCheckpoint: the row that makes a checkpoint exist, and its usage billable."""

from __future__ import annotations

import math
from typing import Any

from sqlmodel import select

from finery.types.ids import new_id
from finery_protos.v1 import worker_pb2 as pb
from finery_service.checkpoints.tables import CheckpointRow
from finery_service.clock import milliseconds
from finery_service.jobs import attempts, store
from finery_service.jobs.tables import AttemptRow, JobRow
from finery_service.rpc import checks, fence
from finery_service.rpc.begin import output_prefix
from finery_service.rpc.fence import Call
from finery_service.usage import ledger

_KINDS = {"lora": "adapter", "full": "full"}
"""Type of the job's adapter -> kind of its checkpoints."""


async def publish_checkpoint(call: Call, request: pb.PublishCheckpointRequest) -> pb.PublishCheckpointResponse:
    """The row, under the fence, after all files were uploaded; a step that has one keeps it."""
    manifest = _check(request)
    job, attempt = await fence.find(call, request.attempt_id, request.fence)
    fence.must_run(job, attempt, "train")
    for field in ("prefix", "resume_prefix"):
        checks.key_below(getattr(request, field), output_prefix(attempt), field)
    _check_against_spec(job, request)
    checkpoint_id = await _existing(call, job, request)
    if checkpoint_id is None:
        if request.step > attempt.step:
            checks.not_now(f"step: committed through {attempt.step}, found {request.step}: commit its steps first")
        last = await attempts.checkpoint_step(call.session, job) or 0
        if request.step < last:
            checks.not_now(f"step: expected it after the last checkpoint's, {last}, found {request.step}")
        if request.final != (request.step == job.total_steps):
            _stop_early(job, attempt, request)
        checkpoint_id = await _publish(call, job, attempt, request, manifest)
    return pb.PublishCheckpointResponse(checkpoint_id=checkpoint_id, orders=await fence.renew(call, job, attempt))


def _check(request: pb.PublishCheckpointRequest) -> dict[str, Any]:
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
    for name in ("validation_loss", "validation_reward"):
        if request.HasField(name) and not math.isfinite(getattr(request, name)):
            checks.invalid(f"{name}: expected a finite number or none at all, found {getattr(request, name)}")
    return checks.json_object(request.manifest_json, "manifest_json")


def _check_against_spec(job: JobRow, request: pb.PublishCheckpointRequest) -> None:
    kind = _KINDS[job.spec["adapter"]["type"]]
    if request.kind != kind:
        checks.invalid(f"kind: expected {kind}, as the job asks for, found {request.kind[:80]!r}")
    if request.HasField("validation_loss") and (job.method == "rl" or job.validation_file_id is None):
        checks.invalid("validation_loss: expected none, as the job has no validation file")
    if request.HasField("validation_reward") and not job.spec["hyperparameters"].get("eval_prompts"):
        checks.invalid("validation_reward: expected none, as the job has no eval_prompts")


def _stop_early(job: JobRow, attempt: AttemptRow, request: pb.PublishCheckpointRequest) -> None:
    """A final checkpoint before the last step: allowed where the worker stops, if the job may stop early. It becomes
    the job's last step: none after it is granted, or committed."""
    hyper = job.spec["hyperparameters"]
    may_stop = hyper.get("early_stopping_patience") is not None or hyper.get("target_reward") is not None
    if not request.final or not may_stop:
        checks.not_now(f"final: expected it at step {job.total_steps} and only there, found step {request.step}")
    if request.step != attempt.step:
        checks.not_now(f"final: expected it at the last committed step {attempt.step}, found step {request.step}")
    job.stopped_step = attempt.granted_through = request.step


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
        kind=request.kind,
        validation_loss=request.validation_loss if request.HasField("validation_loss") else None,
        validation_reward=request.validation_reward if request.HasField("validation_reward") else None,
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
    job.last_checkpoint_id = row.id
    job.faults = {}  # the retry budget counts faults without progress
    await call.session.flush()
    data = {
        "checkpoint": row.id,
        "step": row.step,
        "final": row.final,
        "validation_loss": row.validation_loss,
        "validation_reward": row.validation_reward,
    }
    await store.append_event(call.session, tenant=job.tenant_id, job=job.id, type="checkpoint", data=data, now=call.now)
    return row.id
