"""What workers call, over a real server: fences, repeats, refusals, and the path from Begin to Finish."""

from __future__ import annotations

import json
import math
from collections.abc import AsyncIterator
from decimal import Decimal

import grpc
import pytest
import pytest_asyncio
from pydantic import SecretStr
from sqlalchemy.ext.asyncio import AsyncEngine

from finery.types.jobs import Intent
from finery_protos.v1 import worker_pb2 as pb
from finery_protos.v1.worker_pb2_grpc import WorkersStub
from finery_service.db.engine import transaction
from finery_service.jobs import store
from finery_service.jobs.tables import AttemptRow
from finery_service.rpc.tokens import attempt_token
from finery_service.settings import Settings
from finery_testing import control, factories
from finery_testing.clock import FakeClock
from finery_testing.control import Worker, step

Code = grpc.StatusCode
SETTINGS = Settings(worker_secret=SecretStr(control.SECRET), store_url="file:///objects")


@pytest_asyncio.fixture
async def channel(system_engine: AsyncEngine, clock: FakeClock) -> AsyncIterator[grpc.aio.Channel]:
    async with control.rpc(system_engine, SETTINGS, clock) as channel:
        yield channel


@pytest_asyncio.fixture
async def worker(channel: grpc.aio.Channel, system_engine: AsyncEngine, clock: FakeClock) -> Worker:
    """A launched train attempt (fence 1) of a job of 4 steps, before Begin."""
    tenant = await factories.tenant(system_engine, now=clock())
    job = await factories.job(
        system_engine, tenant, now=clock(), state="starting", fence=1, total_steps=4, prepared_prefix="p/"
    )
    return Worker(channel, await factories.attempt(system_engine, job, now=clock(), state="starting"))


@pytest_asyncio.fixture
async def preparing(channel: grpc.aio.Channel, system_engine: AsyncEngine, clock: FakeClock) -> Worker:
    """A launched prepare attempt, before Begin."""
    tenant = await factories.tenant(system_engine, now=clock())
    job = await factories.job(system_engine, tenant, now=clock(), state="validating", fence=1)
    return Worker(channel, await factories.attempt(system_engine, job, now=clock(), state="starting", kind="prepare"))


async def refused(call: object, code: grpc.StatusCode, message: str | None = None) -> None:
    with pytest.raises(grpc.aio.AioRpcError, match=message) as caught:
        await call  # type: ignore[misc]
    assert caught.value.code() is code, caught.value.details()


async def _state_of(engine: AsyncEngine, worker: Worker) -> tuple[object, ...]:
    """Everything that a call could change, the lease aside."""
    job = await control.job_row(engine, worker.attempt.job_id)
    rows = [row.model_dump(exclude={"lease_expires_at"}) for row in await control.attempts(engine, job.id)]
    usage = await control.usage(engine, job.id)
    return job.model_dump(), rows, usage, len(await control.events(engine, job.id))


async def test_begin_runs_the_job_and_hands_out_everything(
    worker: Worker, system_engine: AsyncEngine, clock: FakeClock
) -> None:
    assignment = await worker.begin()
    job = await control.job_row(system_engine, worker.attempt.job_id)
    assert job.state == "running"
    assert (assignment.kind, assignment.job_id, assignment.tenant_id) == (pb.ATTEMPT_KIND_TRAIN, job.id, job.tenant_id)
    assert json.loads(assignment.spec_json) == job.spec
    assert json.loads(assignment.model_source_json)["type"] == "wheel"
    assert assignment.training_key.startswith(f"{job.tenant_id}/files/")
    assert (assignment.prepared_prefix, assignment.start_prefix) == ("p/", "")
    assert assignment.output_prefix == f"{job.tenant_id}/jobs/{job.id}/{worker.attempt.id}/"
    assert not assignment.HasField("resume")
    assert assignment.orders == pb.Orders(intent=pb.INTENT_RUN, granted_through=4, lease_seconds=15)
    assert await worker.begin() == assignment  # the answer was lost
    [attempt] = await control.attempts(system_engine, job.id)
    assert (attempt.state, attempt.code_version) == ("running", "test")
    assert [event.data["to"] for event in await control.events(system_engine, job.id, "state")] == ["running"]


async def test_a_second_worker_of_an_attempt_that_made_progress_is_fenced(worker: Worker) -> None:
    await worker.begin()
    await worker.commit(step(1))
    await refused(worker.begin(), Code.ABORTED, "second worker")


async def test_the_whole_path_bills_each_step_once(worker: Worker, system_engine: AsyncEngine) -> None:
    await worker.begin()
    await worker.commit(step(0, evaluation=3.94))
    await worker.commit(step(1), step(2))
    first = await worker.publish(2)
    await worker.commit(step(3), step(4, evaluation=3.48))
    assert (await worker.publish(2)).checkpoint_id == first.checkpoint_id
    final = await worker.publish(4, final=True)
    await worker.finish("completed")
    job = await control.job_row(system_engine, worker.attempt.job_id)
    assert (job.state, job.reason, job.step) == ("succeeded", "completed", 4)
    assert job.last_checkpoint_id == final.checkpoint_id
    steps = [(f"step:{number}", "billable", 100) for number in range(1, 5)]
    evaluations = [("eval:0", "billable", 7), ("eval:4", "billable", 7)]
    assert sorted(await control.usage(system_engine, job.id)) == sorted(steps + evaluations)
    types = [event.type for event in await control.events(system_engine, job.id)]
    assert types == (
        [
            "state",
            "eval",
            "metric",
            "metric",
            "checkpoint",
            "metric",
            "metric",
            "eval",
            "checkpoint",
            "attempt",
            "state",
        ]
    )
    assert [event.seq for event in await control.events(system_engine, job.id)] == list(range(1, 12))


async def test_a_metric_event_shows_the_cost_so_far_as_exact_text(worker: Worker, system_engine: AsyncEngine) -> None:
    await worker.begin()
    await worker.commit(step(0, evaluation=3.0), step(1, tokens=1_234_567))
    await worker.commit(step(2, tokens=1))
    first, second = await control.events(system_engine, worker.attempt.job_id, "metric")
    # By hand: 1,234,567 x 0.40 USD / 1e6 = 0.4938268; 7 x 0.10 / 1e6 = 0.0000007; 1 x 0.40 / 1e6 = 0.0000004.
    assert first.data["cost"] == "0.4938275"
    assert second.data["cost"] == str(Decimal("0.4938275") + Decimal("0.0000004"))
    assert first.data["trained_tokens"] == 1_234_567
    assert isinstance(first.data["trained_tokens"], int)
    assert (first.data["step"], first.data["total_steps"], first.data["loss"]) == (1, 4, 2.5)


async def test_numbers_that_are_not_finite_are_null_and_named(worker: Worker, system_engine: AsyncEngine) -> None:
    await worker.begin()
    await worker.commit(step(1, loss=math.nan), step(2, loss=-math.inf, evaluation=math.inf))
    one, two = await control.events(system_engine, worker.attempt.job_id, "metric")
    [evaluation] = await control.events(system_engine, worker.attempt.job_id, "eval")
    assert (one.data["loss"], one.data["non_finite"]) == (None, {"loss": "NaN"})
    assert (two.data["loss"], two.data["non_finite"]) == (None, {"loss": "-Infinity"})
    assert (evaluation.data["loss"], evaluation.data["non_finite"]) == (None, {"loss": "Infinity"})


async def test_every_call_may_be_repeated_and_changes_nothing_the_second_time(
    worker: Worker, system_engine: AsyncEngine, clock: FakeClock
) -> None:
    await worker.begin()
    calls = (
        lambda: worker.commit(step(0, evaluation=3.9)),
        lambda: worker.commit(step(1), step(2)),
        lambda: worker.publish(2),
        lambda: worker.commit(step(3), step(4)),
        lambda: worker.publish(4, final=True),
        lambda: worker.finish("completed"),
    )
    for call in calls:
        first = await call()
        clock.advance(1)
        after = await _state_of(system_engine, worker)
        assert await call() == first
        assert await _state_of(system_engine, worker) == after


async def test_a_partly_repeated_commit_adds_only_the_new_steps(worker: Worker, system_engine: AsyncEngine) -> None:
    await worker.begin()
    await worker.commit(step(0, evaluation=3.9))
    await worker.commit(step(0, evaluation=3.9), step(1))
    await worker.commit(step(1), step(2), step(3))
    job = worker.attempt.job_id
    assert [unit for unit, _, _ in await control.usage(system_engine, job)] == ["eval:0", "step:1", "step:2", "step:3"]
    metrics = await control.events(system_engine, job, "metric")
    assert [event.data["step"] for event in metrics] == [1, 2, 3]
    assert metrics[0].data["cost"] == "0.0000407"  # 7 x 0.10 + 100 x 0.40, per million


async def test_gaps_and_steps_beyond_the_grant_are_refused(worker: Worker, system_engine: AsyncEngine) -> None:
    await worker.begin()
    await control.execute(system_engine, "update attempts set granted_through = 2")
    before = await _state_of(system_engine, worker)
    await refused(worker.commit(step(2)), Code.FAILED_PRECONDITION, "expected 1 next, found 2")
    await refused(worker.commit(step(1), step(2), step(3)), Code.FAILED_PRECONDITION, "granted through 2, found 3")
    assert await _state_of(system_engine, worker) == before


async def test_grants_follow_the_acknowledged_step_and_stop_with_the_intent(
    channel: grpc.aio.Channel, worker: Worker, system_engine: AsyncEngine
) -> None:
    await control.execute(system_engine, "update jobs set total_steps = 100")
    assert (await worker.begin()).orders.granted_through == 8
    assert (await worker.commit(step(1), step(2))).granted_through == 10
    async with transaction(system_engine) as session:
        await store.set_intent(session, worker.attempt.job_id, Intent.CANCEL)
    assert await worker.commit(step(3)) == pb.Orders(intent=pb.INTENT_CANCEL, granted_through=10, lease_seconds=15)
    assert (await worker.heartbeat()).granted_through == 10


@pytest.mark.parametrize(
    ("bad", "message"),
    [
        (pb.Step(step=1, usage=[pb.Usage(sku="train.sft", unit="step:1", quantity=-1)]), "0 to 2.53 units, found -1"),
        (pb.Step(step=1, usage=[pb.Usage(sku="train.dpo", unit="step:1", quantity=1)]), "found 'train.dpo'"),
        (pb.Step(step=1, usage=[pb.Usage(sku="train.sft", unit="step:2", quantity=1)]), "expected step:1"),
        (pb.Step(step=1, usage=[pb.Usage(sku="eval.sft", unit="step:1", quantity=1)]), "expected eval:1"),
        (pb.Step(step=1, usage=[pb.Usage(sku="train.sft", unit="step:1")] * 2), "each SKU once"),
        (pb.Step(step=0, usage=[pb.Usage(sku="train.sft", unit="step:0", quantity=1)]), "steps from 1"),
        (pb.Step(step=0, metrics={"loss": 1.0}), "only the evaluation"),
        (pb.Step(step=-1), "contiguous"),
        (pb.Step(step=1, metrics={"cost": 0.0}), "none of ours, found 'cost'"),
        (pb.Step(step=1, metrics={"Bad Name": 0.0}), "found 'Bad Name'"),
    ],
)
async def test_a_bad_step_is_refused_and_leaves_nothing(
    worker: Worker, system_engine: AsyncEngine, bad: pb.Step, message: str
) -> None:
    await worker.begin()
    before = await _state_of(system_engine, worker)
    await refused(worker.commit(bad), Code.INVALID_ARGUMENT, message)
    await refused(worker.commit(), Code.INVALID_ARGUMENT, "at least one")
    await refused(worker.commit(step(1), step(3)), Code.INVALID_ARGUMENT, "expected 2")
    assert await _state_of(system_engine, worker) == before


async def test_unknown_fields_are_refused_at_any_depth(channel: grpc.aio.Channel, worker: Worker) -> None:
    await worker.begin()
    await refused(worker.commit(pb.Step.FromString(b"\x08\x01\x98\x06\x01")), Code.INVALID_ARGUMENT, "steps: .*99")
    usage = pb.Usage.FromString(b"\x98\x06\x01")
    await refused(worker.commit(pb.Step(step=1, usage=[usage])), Code.INVALID_ARGUMENT, "steps.usage: .*99")


async def test_a_wrong_token_is_refused_before_anything_else(channel: grpc.aio.Channel, worker: Worker) -> None:
    stub = WorkersStub(channel)
    request = pb.HeartbeatRequest(attempt_id=worker.attempt.id, fence=1)
    other = attempt_token(control.SECRET, worker.attempt.id, 2)
    for metadata in ((), (("authorization", "Bearer x"),), (("authorization", f"Bearer {other}"),)):
        await refused(stub.Heartbeat(request, metadata=metadata), Code.UNAUTHENTICATED, "token of this attempt")


async def test_an_older_fence_changes_no_row(
    channel: grpc.aio.Channel, worker: Worker, system_engine: AsyncEngine, clock: FakeClock
) -> None:
    await worker.begin()
    await worker.commit(step(1))
    ended = "update attempts set state = 'ended', reason = 'worker_lost', ended_at = now() where id = :id"
    await control.execute(system_engine, ended, id=worker.attempt.id)
    job = await control.job_row(system_engine, worker.attempt.job_id)
    await control.execute(system_engine, "update jobs set fence = 2")
    newer = Worker(channel, await factories.attempt(system_engine, job, now=clock(), fence=2))
    before = await _state_of(system_engine, worker)
    await refused(worker.begin(), Code.ABORTED)
    await refused(worker.heartbeat(), Code.ABORTED)
    await refused(worker.commit(step(2)), Code.ABORTED, "write nothing more")
    await refused(worker.publish(1), Code.ABORTED)
    await refused(worker.finish("platform_fault"), Code.ABORTED)
    unknown = worker.attempt.model_copy(update={"id": "att_unknown"})
    await refused(Worker(channel, unknown).commit(step(2)), Code.ABORTED, "no attempt")
    assert await _state_of(system_engine, worker) == before
    assert (await newer.heartbeat()).intent == pb.INTENT_RUN


async def test_heartbeat_renews_the_lease_by_the_databases_clock(worker: Worker, system_engine: AsyncEngine) -> None:
    await refused(worker.heartbeat(), Code.ABORTED)  # not before Begin
    await worker.begin()
    await control.expire_lease(system_engine, worker.attempt.id)
    await worker.heartbeat()
    async with transaction(system_engine) as session:
        now = await store.database_now(session)
    [attempt] = await control.attempts(system_engine, worker.attempt.job_id)
    assert 14 < (attempt.lease_expires_at - now).total_seconds() <= 15


async def test_a_checkpoint_needs_its_steps_committed_and_files_below_its_attempt(
    worker: Worker, system_engine: AsyncEngine
) -> None:
    await worker.begin()
    await worker.commit(step(1))
    before = await _state_of(system_engine, worker)
    await refused(worker.publish(2), Code.FAILED_PRECONDITION, "committed through 1, found 2")
    await refused(worker.publish(1, final=True), Code.FAILED_PRECONDITION, "expected it at step 4")
    await refused(worker.publish(1, prefix="ten_other/jobs/x/"), Code.INVALID_ARGUMENT, "object key below")
    await refused(worker.publish(1, prefix=f"{worker.prefix}../x/"), Code.INVALID_ARGUMENT, "object key below")
    await refused(worker.publish(1, files=[]), Code.INVALID_ARGUMENT, "at least one")
    bad = [pb.CheckpointFile(path="../x", bytes=1, sha256=control.SHA)]
    await refused(worker.publish(1, files=bad), Code.INVALID_ARGUMENT, "relative path")
    await refused(worker.publish(1, resume_sha256="abc"), Code.INVALID_ARGUMENT, "64 lower-case hex")
    await refused(worker.publish(1, manifest_json='{"a": NaN}'), Code.INVALID_ARGUMENT, "NaN")
    assert await _state_of(system_engine, worker) == before


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
    assert event.data == {"checkpoint": answer.checkpoint_id, "step": 2, "final": False}


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
    await refused(worker.finish("cancelled_by_customer"), Code.FAILED_PRECONDITION, "nobody cancelled")
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
    before = await _state_of(system_engine, worker)
    await refused(worker.finish("completed"), Code.ABORTED)
    await refused(worker.commit(step(3)), Code.ABORTED)
    assert await _state_of(system_engine, worker) == before
    terminal = [e for e in await control.events(system_engine, job.id, "state") if e.data["to"] == "cancelled"]
    assert len(terminal) == 1


async def test_prepared_data_queue_the_job_and_a_later_finish_is_a_no_op(
    preparing: Worker, system_engine: AsyncEngine
) -> None:
    assert (await preparing.begin()).kind == pb.ATTEMPT_KIND_PREPARE
    await preparing.heartbeat()
    first = await preparing.prepared(dropped_rows=1, truncated_rows=2, statistics_json='{"longest": 9}')
    job = await control.job_row(system_engine, preparing.attempt.job_id)
    assert (job.state, job.reason, job.total_steps, job.quote_tokens) == ("queued", "waiting_for_capacity", 4, 400)
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
        "statistics": {"longest": 9},
    }
    before = await _state_of(system_engine, preparing)
    assert await preparing.prepared() == first
    await preparing.finish("completed")
    assert await _state_of(system_engine, preparing) == before


async def test_counts_that_cannot_be_are_refused(preparing: Worker, system_engine: AsyncEngine) -> None:
    await preparing.begin()
    before = await _state_of(system_engine, preparing)
    for name in ("rows", "trained_tokens", "total_steps", "tokens", "total_trained_tokens"):
        await refused(preparing.prepared(**{name: 0}), Code.INVALID_ARGUMENT, f"{name}: expected at least 1, found 0")
    await refused(preparing.prepared(trained_tokens=501), Code.INVALID_ARGUMENT, "at most tokens")
    await refused(preparing.prepared(truncated_rows=11), Code.INVALID_ARGUMENT, "at most rows")
    await refused(preparing.prepared(dropped_rows=-1), Code.INVALID_ARGUMENT, "found -1")
    await refused(preparing.prepared(prepared_prefix="elsewhere/"), Code.INVALID_ARGUMENT, "object key below")
    await refused(preparing.finish("completed"), Code.FAILED_PRECONDITION, "ReportPrepared")
    await refused(preparing.commit(step(1)), Code.FAILED_PRECONDITION, "expected a train attempt")
    assert await _state_of(system_engine, preparing) == before


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


async def test_a_database_that_is_away_is_unavailable_so_that_the_worker_tries_again(clock: FakeClock) -> None:
    from finery_service.db.engine import create_engine

    engine = create_engine("postgresql://finery_system:x@127.0.0.1:1/none")
    attempt = AttemptRow(id="att_x", fence=1, tenant_id="t", job_id="j", kind="train", state="running")
    async with control.rpc(engine, SETTINGS, clock) as channel:
        await refused(Worker(channel, attempt).commit(step(1)), Code.UNAVAILABLE, "try again")
