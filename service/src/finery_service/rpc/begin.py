"""Begin: the worker takes the lease and gets everything it needs."""

from __future__ import annotations

import json

from sqlmodel import select

from finery.types.jobs import JobState
from finery_protos.v1 import worker_pb2 as pb
from finery_service.checkpoints.tables import CheckpointRow
from finery_service.clock import milliseconds
from finery_service.files.tables import FileRow
from finery_service.jobs import store
from finery_service.jobs.tables import AttemptRow, JobRow
from finery_service.models.tables import ModelRow
from finery_service.rpc import checks, fence
from finery_service.rpc.fence import Call

_KINDS = {"prepare": pb.ATTEMPT_KIND_PREPARE, "train": pb.ATTEMPT_KIND_TRAIN}
_MAX_CODE_VERSION = 200


async def begin(call: Call, request: pb.BeginRequest) -> pb.Assignment:
    """A repeated call (the answer was lost) gets the same assignment, until the first step is committed."""
    if len(request.code_version) > _MAX_CODE_VERSION:
        checks.invalid(f"code_version: expected at most {_MAX_CODE_VERSION} characters")
    job, attempt = await fence.find(call, request.attempt_id, request.fence)
    fence.must_live(job, attempt)
    if attempt.state == "starting":
        attempt.state = "running"
        attempt.code_version = request.code_version or None
        await _run(call, job, attempt)
    elif attempt.step != attempt.resumed_from_step:
        checks.fenced_off(f"attempt {attempt.id} began before and has committed steps since: a second worker stops")
    orders = await fence.renew(call, job, attempt)
    return await _assignment(call, job, attempt, orders)


def output_prefix(attempt: AttemptRow) -> str:
    """Where an attempt may write; ends with a slash."""
    return f"{attempt.tenant_id}/jobs/{attempt.job_id}/{attempt.id}/"


async def _run(call: Call, job: JobRow, attempt: AttemptRow) -> None:
    if attempt.kind == "prepare":
        moved = job.state == JobState.VALIDATING
    else:
        moved = await store.move(call.session, job.id, to=JobState.RUNNING, reason=None, now=call.now)
    if not moved:
        checks.fenced_off(f"job {job.id} is {job.state}: nothing to do for attempt {attempt.id}")


async def _assignment(call: Call, job: JobRow, attempt: AttemptRow, orders: pb.Orders) -> pb.Assignment:
    assignment = pb.Assignment(
        kind=_KINDS[attempt.kind],
        job_id=job.id,
        tenant_id=job.tenant_id,
        spec_json=json.dumps(job.spec),
        output_prefix=output_prefix(attempt),
        prepared_prefix=job.prepared_prefix or "",
        preview_json=json.dumps(job.preview["request"]) if job.preview else "",
        environment_json=json.dumps(job.environment) if job.environment else "",
        run_json=json.dumps(job.run["request"]) if job.run else "",
        base=await _base(call, job),
        created_ms=milliseconds(job.created_at),
        orders=orders,
    )
    await _add_model(call, job, assignment)
    await _add_files(call, job, assignment)
    last = await _checkpoint(call, job, job.last_checkpoint_id)
    if last is not None and attempt.kind == "train":
        resume = pb.Resume(checkpoint_id=last.id, step=last.step, prefix=last.resume_prefix, sha256=last.resume_sha256)
        assignment.resume.CopyFrom(resume)
    source = await _checkpoint(call, job, job.from_checkpoint_id)
    if source is not None and source.id not in {part.checkpoint_id for part in assignment.base}:
        assignment.start_prefix = source.prefix
    return assignment


async def _add_model(call: Call, job: JobRow, assignment: pb.Assignment) -> None:
    if job.model_id is not None:
        model = await call.session.get_one(ModelRow, job.model_id)
        assignment.model_source_json, assignment.model_name = json.dumps(model.source), model.name


async def _add_files(call: Call, job: JobRow, assignment: pb.Assignment) -> None:
    if job.training_file_id is not None:
        training = await call.session.get_one(FileRow, (job.tenant_id, job.training_file_id))
        assignment.training_key, assignment.training_sha256 = training.object_key, training.sha256
        assignment.training_encoding = training.encoding
    if job.validation_file_id is not None:
        validation = await call.session.get_one(FileRow, (job.tenant_id, job.validation_file_id))
        assignment.validation_key, assignment.validation_sha256 = validation.object_key, validation.sha256
        assignment.validation_encoding = validation.encoding


async def _base(call: Call, job: JobRow) -> list[pb.BasePart]:
    """What a checkpoint that the job starts from has put on top of the catalogue's model, in order."""
    rows = [await _checkpoint(call, job, part["checkpoint"]) for part in job.base]
    parts = zip(rows, job.base, strict=True)
    return [pb.BasePart(checkpoint_id=row.id, prefix=row.prefix, kind=part["kind"]) for row, part in parts if row]


async def _checkpoint(call: Call, job: JobRow, checkpoint_id: str | None) -> CheckpointRow | None:
    if checkpoint_id is None:
        return None
    statement = select(CheckpointRow).where(CheckpointRow.tenant_id == job.tenant_id, CheckpointRow.id == checkpoint_id)
    return (await call.session.exec(statement)).one()
