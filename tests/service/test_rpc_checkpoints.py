"""What a checkpoint says of itself, early ends, and what a job starts from, over a real server."""

from __future__ import annotations

import json
from typing import Any

import grpc
import pytest
from sqlalchemy.ext.asyncio import AsyncEngine

from finery.types.jobs import Intent
from finery_protos.v1 import worker_pb2 as pb
from finery_service.checkpoints.tables import CheckpointRow
from finery_service.db.engine import transaction
from finery_service.jobs import store
from finery_testing import control, factories
from finery_testing.api import checkpoint
from finery_testing.clock import FakeClock
from finery_testing.control import Worker, refused, state_of, step

pytest_plugins = ("finery_testing.control_fixtures",)

Code = grpc.StatusCode


async def may_stop_early(engine: AsyncEngine, worker: Worker) -> None:
    """Gives the job a patience and a validation file."""
    job = await control.job_row(engine, worker.attempt.job_id)
    spec = json.dumps({**job.spec, "hyperparameters": {**job.spec["hyperparameters"], "early_stopping_patience": 1}})
    statement = "update jobs set spec = cast(:spec as jsonb), validation_file_id = training_file_id where id = :job"
    await control.execute(engine, statement, spec=spec, job=job.id)


async def test_kind_and_validation_loss_are_held_to_the_job(worker: Worker, system_engine: AsyncEngine) -> None:
    await worker.begin()
    await worker.commit(step(1))
    before = await state_of(system_engine, worker)
    for kind in ("full", "", "lora"):
        await refused(worker.publish(1, kind=kind), Code.INVALID_ARGUMENT, "kind: expected adapter")
    await refused(worker.publish(1, validation_loss=2.0), Code.INVALID_ARGUMENT, "no validation file")
    for loss in (float("nan"), float("inf"), float("-inf")):
        await refused(worker.publish(1, validation_loss=loss), Code.INVALID_ARGUMENT, "a finite number or none")
    assert await state_of(system_engine, worker) == before


async def test_a_checkpoint_that_comes_late_never_becomes_the_last(worker: Worker, system_engine: AsyncEngine) -> None:
    await worker.begin()
    await worker.commit(step(1), step(2), step(3))
    last = await worker.publish(3)
    before = await state_of(system_engine, worker)
    await refused(worker.publish(2), Code.FAILED_PRECONDITION, "after the last checkpoint's, 3, found 2")
    assert (await worker.publish(3)).checkpoint_id == last.checkpoint_id, "a repeated one is answered"
    assert await state_of(system_engine, worker) == before


async def test_a_validation_loss_is_kept_and_told(worker: Worker, system_engine: AsyncEngine) -> None:
    await may_stop_early(system_engine, worker)
    await worker.begin()
    await worker.commit(step(1), step(2))
    with_loss = await worker.publish(1, validation_loss=0.0)
    without = await worker.publish(2)
    told = [event.data for event in await control.events(system_engine, worker.attempt.job_id, "checkpoint")]
    head = {"final": False, "validation_reward": None}
    assert told == [
        {"checkpoint": with_loss.checkpoint_id, "step": 1, "validation_loss": 0.0, **head},
        {"checkpoint": without.checkpoint_id, "step": 2, "validation_loss": None, **head},
    ]
    async with transaction(system_engine) as session:
        row = await session.get_one(CheckpointRow, (worker.attempt.tenant_id, with_loss.checkpoint_id))
    assert (row.kind, row.validation_loss) == ("adapter", 0.0)


async def test_an_early_end_is_the_jobs_last_step_and_a_success(worker: Worker, system_engine: AsyncEngine) -> None:
    await may_stop_early(system_engine, worker)
    await worker.begin()
    await worker.commit(step(1), step(2))
    await refused(worker.finish("stopped_early"), Code.FAILED_PRECONDITION, "final checkpoint before the last step")
    await refused(worker.publish(1, final=True), Code.FAILED_PRECONDITION, "at the last committed step 2, found step 1")
    answer = await worker.publish(2, final=True, validation_loss=1.5)
    assert answer.orders.granted_through == 2
    assert (await worker.heartbeat()).granted_through == 2, "nothing is granted after the last step"
    await refused(worker.commit(step(3)), Code.FAILED_PRECONDITION, "granted through 2")
    await refused(worker.finish("completed"), Code.FAILED_PRECONDITION, "all 4 steps committed, found 2")
    await worker.finish("stopped_early")
    await worker.finish("stopped_early")  # the answer was lost
    job = await control.job_row(system_engine, worker.attempt.job_id)
    assert (job.state, job.reason, job.stopped_step, job.total_steps) == ("succeeded", "stopped_early", 2, 4)
    assert [state for _, state, _ in await control.usage(system_engine, job.id)] == ["billable", "billable"]


async def test_who_did_not_ask_for_early_stopping_never_ends_early(worker: Worker, system_engine: AsyncEngine) -> None:
    await worker.begin()
    await worker.commit(step(1), step(2))
    before = await state_of(system_engine, worker)
    await refused(worker.publish(2, final=True), Code.FAILED_PRECONDITION, "expected it at step 4 and only there")
    await refused(worker.finish("stopped_early"), Code.FAILED_PRECONDITION, "final checkpoint before the last step")
    assert await state_of(system_engine, worker) == before


async def test_after_an_early_end_a_lost_worker_is_followed_by_one_that_only_finishes(
    channel: grpc.aio.Channel, worker: Worker, system_engine: AsyncEngine, clock: FakeClock
) -> None:
    await may_stop_early(system_engine, worker)
    await worker.begin()
    await worker.commit(step(1), step(2))
    await worker.publish(2, final=True)
    await worker.finish("platform_fault")
    job = await control.job_row(system_engine, worker.attempt.job_id)
    assert (job.state, job.step) == ("queued", 2)
    await control.execute(system_engine, "update jobs set state = 'starting', fence = 2")
    values = {"fence": 2, "state": "starting", "step": 2, "resumed_from_step": 2, "granted_through": 2}
    second = Worker(channel, await factories.attempt(system_engine, job, now=clock(), **values))
    assert (await second.begin()).orders.granted_through == 2
    await second.finish("stopped_early")
    assert (await control.job_row(system_engine, job.id)).state == "succeeded"


@pytest.mark.parametrize("kind", ["train", "prepare"])
async def test_a_model_that_does_not_fit_fails_the_job(
    worker: Worker, preparing: Worker, system_engine: AsyncEngine, kind: str
) -> None:
    speaker = worker if kind == "train" else preparing
    await speaker.begin()
    error = {"message": "expected …", "type": "invalid_request_error", "code": "invalid_model", "param": "adapter"}
    await speaker.finish("invalid_model", json.dumps(error))
    job = await control.job_row(system_engine, speaker.attempt.job_id)
    assert (job.state, job.reason, job.error) == ("failed", "invalid_model", error)


async def test_a_pause_that_was_withdrawn_while_the_worker_stopped_leads_back_to_the_queue(
    worker: Worker, system_engine: AsyncEngine
) -> None:
    await worker.begin()
    await worker.commit(step(1))
    await refused(worker.finish("paused_by_customer"), Code.FAILED_PRECONDITION, "nobody asked for it")
    for intent in (Intent.PAUSE, Intent.RUN):
        async with transaction(system_engine) as session:
            await store.set_intent(session, worker.attempt.job_id, intent)
    await worker.publish(1)
    await worker.finish("paused_by_customer")
    job = await control.job_row(system_engine, worker.attempt.job_id)
    assert (job.state, job.intent) == ("queued", "run")


async def test_begin_tells_base_start_encodings_and_preview(
    channel: grpc.aio.Channel, system_engine: AsyncEngine, clock: FakeClock
) -> None:
    tenant = await factories.tenant(system_engine, now=clock())
    parent = await factories.job(system_engine, tenant, now=clock(), state="succeeded")
    whole, merged, start = [await checkpoint(system_engine, parent, now=clock(), step=n) for n in (1, 2, 3)]
    parquet = await factories.file(system_engine, tenant, now=clock(), encoding="parquet")
    base = [{"checkpoint": whole.id, "kind": "full"}, {"checkpoint": merged.id, "kind": "merge"}]
    values: dict[str, Any] = {
        "base": base,
        "fence": 1,
        "training_file": parquet,
        "preview": {"request": {"model": "m"}},
    }
    jobs = [
        await factories.job(system_engine, tenant, now=clock(), state="starting", from_checkpoint_id=id_, **values)
        for id_ in (start.id, merged.id)
    ]
    attempts = [await factories.attempt(system_engine, job, now=clock(), state="starting") for job in jobs]
    goes_on, starts_new = [await Worker(channel, attempt).begin() for attempt in attempts]
    assert list(goes_on.base) == [
        pb.BasePart(checkpoint_id=whole.id, prefix=whole.prefix, kind="full"),
        pb.BasePart(checkpoint_id=merged.id, prefix=merged.prefix, kind="merge"),
    ]
    assert goes_on.start_prefix == start.prefix
    assert (starts_new.base, starts_new.start_prefix) == (goes_on.base, ""), "a merged checkpoint does not go on"
    assert (goes_on.training_encoding, goes_on.validation_encoding) == ("parquet", "")
    assert json.loads(goes_on.preview_json) == {"model": "m"}
