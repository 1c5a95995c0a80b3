"""Checkpoints, prepared data and the end of attempts, over a real server."""

from __future__ import annotations

import json

import grpc
import pytest
from sqlalchemy.ext.asyncio import AsyncEngine

from finery.types import data
from finery.types.jobs import Intent
from finery_protos.v1 import worker_pb2 as pb
from finery_service.db.engine import transaction
from finery_service.jobs import store
from finery_testing import control, factories
from finery_testing.clock import FakeClock
from finery_testing.control import Worker, refused, state_of, step

pytest_plugins = ("finery_testing.control_fixtures",)

Code = grpc.StatusCode


async def test_a_checkpoint_needs_its_steps_committed_and_files_below_its_attempt(
    worker: Worker, system_engine: AsyncEngine
) -> None:
    await worker.begin()
    await worker.commit(step(1))
    before = await state_of(system_engine, worker)
    await refused(worker.publish(2), Code.FAILED_PRECONDITION, "committed through 1, found 2")
    await refused(worker.publish(1, final=True), Code.FAILED_PRECONDITION, "expected it at step 4")
    await refused(worker.publish(1, prefix="ten_other/jobs/x/"), Code.INVALID_ARGUMENT, "object key below")
    await refused(worker.publish(1, prefix=f"{worker.prefix}../x/"), Code.INVALID_ARGUMENT, "object key below")
    await refused(worker.publish(1, files=[]), Code.INVALID_ARGUMENT, "at least one")
    bad = [pb.CheckpointFile(path="../x", bytes=1, sha256=control.SHA)]
    await refused(worker.publish(1, files=bad), Code.INVALID_ARGUMENT, "relative path")
    await refused(worker.publish(1, resume_sha256="abc"), Code.INVALID_ARGUMENT, "64 lower-case hex")
    await refused(worker.publish(1, manifest_json='{"a": NaN}'), Code.INVALID_ARGUMENT, "NaN")
    assert await state_of(system_engine, worker) == before


async def test_a_published_checkpoint_bills_through_its_step_and_renews_the_retry_budget(
    worker: Worker, system_engine: AsyncEngine
) -> None:
    await control.execute(system_engine, """update jobs set faults = '{"worker_lost": 4}'""")
    await worker.begin()
    await worker.commit(step(0, evaluation=3.9), step(1), step(2), step(3))
    answer = await worker.publish(2, manifest_json='{"note": "nul \\u0000"}')
    job = await control.job_row(system_engine, worker.attempt.job_id)
    assert (job.last_checkpoint_id, job.faults) == (answer.checkpoint_id, {})
    states = [state for _, state, _ in await control.usage(system_engine, job.id)]
    assert states == ["billable", "billable", "billable", "provisional"]
    [event] = await control.events(system_engine, job.id, "checkpoint")
    shown = {"checkpoint": answer.checkpoint_id, "step": 2, "final": False}
    assert event.data == {**shown, "validation_loss": None, "validation_reward": None}


async def test_success_must_be_proven(worker: Worker, system_engine: AsyncEngine) -> None:
    await worker.begin()
    await worker.commit(step(1), step(2), step(3))
    await refused(worker.finish("completed"), Code.FAILED_PRECONDITION, "all 4 steps committed, found 3")
    await worker.commit(step(4))
    await refused(worker.finish("completed"), Code.FAILED_PRECONDITION, "final checkpoint at step 4")
    await worker.publish(4, final=True)
    await worker.finish("completed")
    assert (await control.job_row(system_engine, worker.attempt.job_id)).state == "succeeded"


async def test_a_fault_requeues_from_the_last_checkpoint_and_the_next_attempt_bills_each_step_once(
    channel: grpc.aio.Channel, worker: Worker, system_engine: AsyncEngine, clock: FakeClock
) -> None:
    await worker.begin()
    await worker.commit(step(0, evaluation=3.9), step(1), step(2), step(3))
    published = await worker.publish(2)
    await worker.finish("platform_fault", '{"message": "disk full", "type": "server_error", "code": "io"}')
    job = await control.job_row(system_engine, worker.attempt.job_id)
    assert (job.state, job.reason, job.step, job.error) == ("queued", "platform_fault", 2, None)
    assert job.not_before is not None
    assert (await control.usage(system_engine, job.id))[-1] == ("step:3", "void", 100)

    await control.execute(system_engine, "update jobs set state = 'starting', fence = 2")
    values = {"fence": 2, "state": "starting", "step": 2, "resumed_from_step": 2, "granted_through": 2}
    second = Worker(channel, await factories.attempt(system_engine, job, now=clock(), **values))
    assignment = await second.begin()
    assert (assignment.resume.checkpoint_id, assignment.resume.step) == (published.checkpoint_id, 2)
    assert assignment.resume.prefix == f"{worker.prefix}resume/step-00000002/"
    await second.commit(step(3), step(4))
    assert (await second.publish(2)).checkpoint_id == published.checkpoint_id  # it exists: the newer one gets it
    await second.publish(4, final=True)
    await second.finish("completed")
    billed = [unit for unit, state, _ in await control.usage(system_engine, job.id) if state == "billable"]
    assert sorted(billed) == ["eval:0", "step:1", "step:2", "step:3", "step:4"]
    metrics = await control.events(system_engine, job.id, "metric")
    assert [event.data["step"] for event in metrics] == [1, 2, 3, 4]  # step 3 is shown once


@pytest.mark.parametrize(("reason", "state"), [("non_finite_loss", "failed"), ("out_of_memory", "failed")])
async def test_a_final_reason_ends_the_job_with_its_error_and_voids_the_rest(
    worker: Worker, system_engine: AsyncEngine, reason: str, state: str
) -> None:
    await worker.begin()
    await worker.commit(step(1), step(2))
    await worker.publish(1)
    error = {"message": "loss is NaN at step 3\0", "type": "invalid_request_error", "code": reason}
    await worker.finish(reason, json.dumps(error))
    job = await control.job_row(system_engine, worker.attempt.job_id)
    assert (job.state, job.reason) == (state, reason)
    assert job.error is not None
    assert job.error["message"] == "loss is NaN at step 3\ufffd"
    assert [row[:2] for row in await control.usage(system_engine, job.id)] == [
        ("step:1", "billable"),
        ("step:2", "void"),
    ]
    assert len([e for e in await control.events(system_engine, job.id, "state") if e.data["to"] == state]) == 1


async def test_finish_refuses_reasons_that_are_not_a_workers_to_give(worker: Worker) -> None:
    await worker.begin()
    for reason in ("", "too_many_faults", "waiting_behind", "worker_lost", "done"):
        await refused(worker.finish(reason), Code.INVALID_ARGUMENT, "reason: expected one of")
    for reason in ("cancelled_by_customer", "paused_by_customer"):
        await refused(worker.finish(reason), Code.FAILED_PRECONDITION, "nobody asked for it")
    await refused(worker.finish("platform_fault", "[1]"), Code.INVALID_ARGUMENT, "JSON object")
    await refused(worker.finish("platform_fault", '{"message": 1}'), Code.INVALID_ARGUMENT, "ErrorDetail")


async def test_e10_cancel_between_the_last_step_and_the_finish_leaves_one_terminal_event(
    worker: Worker, system_engine: AsyncEngine
) -> None:
    await worker.begin()
    await worker.commit(step(1), step(2))
    async with transaction(system_engine) as session:
        await store.set_intent(session, worker.attempt.job_id, Intent.CANCEL)
    assert (await worker.publish(2)).orders.intent == pb.INTENT_CANCEL
    await worker.finish("cancelled_by_customer")
    job = await control.job_row(system_engine, worker.attempt.job_id)
    assert (job.state, job.reason) == ("cancelled", "cancelled_by_customer")
    assert [row[1] for row in await control.usage(system_engine, job.id)] == ["billable", "billable"]
    before = await state_of(system_engine, worker)
    await refused(worker.finish("completed"), Code.ABORTED)
    await refused(worker.commit(step(3)), Code.ABORTED)
    assert await state_of(system_engine, worker) == before
    terminal = [e for e in await control.events(system_engine, job.id, "state") if e.data["to"] == "cancelled"]
    assert len(terminal) == 1


async def test_prepared_data_queue_the_job_and_a_later_finish_is_a_no_op(
    preparing: Worker, system_engine: AsyncEngine
) -> None:
    assert (await preparing.begin()).kind == pb.ATTEMPT_KIND_PREPARE
    await preparing.heartbeat()
    warning = data.Warning(code="reasoning_not_trained", message="expected …", param="hyperparameters.train_on")
    found = control.report(warning, longest=9)
    statistics = found.model_dump_json()
    first = await preparing.prepared(dropped_rows=1, truncated_rows=2, statistics_json=statistics)
    job = await control.job_row(system_engine, preparing.attempt.job_id)
    assert (job.state, job.reason, job.total_steps, job.quote_tokens) == ("queued", "waiting_for_placement", 4, 400)
    assert job.queued_at is not None
    [event] = await control.events(system_engine, job.id, "prepared")
    assert event.data == {
        "rows": 10,
        "tokens": 500,
        "trained_tokens": 200,
        "dropped_rows": 1,
        "truncated_rows": 2,
        "total_steps": 4,
        "total_trained_tokens": 400,
        "statistics": json.loads(statistics),
    }
    assert job.data == json.loads(statistics)
    [told] = await control.events(system_engine, job.id, "warning")
    assert told.data == {"code": "reasoning_not_trained", "message": "expected …", "param": "hyperparameters.train_on"}
    assert told.seq == event.seq + 1
    before = await state_of(system_engine, preparing)
    assert await preparing.prepared() == first
    await preparing.finish("completed")
    assert await state_of(system_engine, preparing) == before


async def test_counts_that_cannot_be_are_refused(preparing: Worker, system_engine: AsyncEngine) -> None:
    await preparing.begin()
    before = await state_of(system_engine, preparing)
    for name in ("rows", "trained_tokens", "total_steps", "tokens", "total_trained_tokens"):
        await refused(preparing.prepared(**{name: 0}), Code.INVALID_ARGUMENT, f"{name}: expected at least 1, found 0")
    await refused(preparing.prepared(trained_tokens=501), Code.INVALID_ARGUMENT, "at most tokens")
    await refused(preparing.prepared(truncated_rows=11), Code.INVALID_ARGUMENT, "at most rows")
    await refused(preparing.prepared(dropped_rows=-1), Code.INVALID_ARGUMENT, "found -1")
    await refused(preparing.prepared(prepared_prefix="elsewhere/"), Code.INVALID_ARGUMENT, "object key below")
    good = json.loads(control.report().model_dump_json())
    both = {"train": good["sets"]["train"], "validation": good["sets"]["train"]}
    for wrong, told in (
        ("", "a wrong sets"),
        ("[]", "JSON object"),
        (json.dumps({**good, "vocab_size": None}), "a wrong vocab_size"),
        (json.dumps({**good, "sets": {}}), "expected train, found none"),
        (
            json.dumps({**good, "sets": both}),
            "found train, validation",
        ),
        (control.report(rows=9).model_dump_json(), "expected 10 as in rows, found 9"),
    ):
        await refused(preparing.prepared(statistics_json=wrong), Code.INVALID_ARGUMENT, told)
    await refused(preparing.finish("completed"), Code.FAILED_PRECONDITION, "ReportPrepared")
    await refused(preparing.commit(step(1)), Code.FAILED_PRECONDITION, "expected a train attempt")
    assert await state_of(system_engine, preparing) == before


async def test_e11_a_job_cancelled_while_it_was_prepared_is_not_queued(
    preparing: Worker, system_engine: AsyncEngine
) -> None:
    await preparing.begin()
    async with transaction(system_engine) as session:
        await store.set_intent(session, preparing.attempt.job_id, Intent.CANCEL)
    await preparing.prepared()
    assert (await control.job_row(system_engine, preparing.attempt.job_id)).state == "cancelled"


async def test_bad_data_fail_the_job_with_the_workers_error(preparing: Worker, system_engine: AsyncEngine) -> None:
    await preparing.begin()
    error = {"message": "line 3", "type": "invalid_request_error", "code": "invalid_data", "param": "training_file"}
    await preparing.finish("invalid_data", json.dumps(error))
    job = await control.job_row(system_engine, preparing.attempt.job_id)
    assert (job.state, job.reason, job.error) == ("failed", "invalid_data", error)
