"""What workers call, over a real server: tokens, fences, repeats, refused steps."""

from __future__ import annotations

import json
import math
from decimal import Decimal

import grpc
import pytest
from sqlalchemy.ext.asyncio import AsyncEngine

from finery.types.jobs import Intent
from finery_protos.v1 import worker_pb2 as pb
from finery_protos.v1.worker_pb2_grpc import WorkersStub
from finery_service.db.engine import transaction
from finery_service.jobs import store
from finery_service.jobs.tables import AttemptRow
from finery_service.rpc.tokens import attempt_token
from finery_testing import control, factories
from finery_testing.clock import FakeClock
from finery_testing.control import Worker, refused, state_of, step

pytest_plugins = ("finery_testing.control_fixtures",)

Code = grpc.StatusCode


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
    assert assignment.created_ms == round(job.created_at.timestamp() * 1000)
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
        after = await state_of(system_engine, worker)
        assert await call() == first
        assert await state_of(system_engine, worker) == after


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
    before = await state_of(system_engine, worker)
    await refused(worker.commit(step(2)), Code.FAILED_PRECONDITION, "expected 1 next, found 2")
    await refused(worker.commit(step(1), step(2), step(3)), Code.FAILED_PRECONDITION, "granted through 2, found 3")
    assert await state_of(system_engine, worker) == before


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
    before = await state_of(system_engine, worker)
    await refused(worker.commit(bad), Code.INVALID_ARGUMENT, message)
    await refused(worker.commit(), Code.INVALID_ARGUMENT, "at least one")
    await refused(worker.commit(step(1), step(3)), Code.INVALID_ARGUMENT, "expected 2")
    assert await state_of(system_engine, worker) == before


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
    before = await state_of(system_engine, worker)
    await refused(worker.begin(), Code.ABORTED)
    await refused(worker.heartbeat(), Code.ABORTED)
    await refused(worker.commit(step(2)), Code.ABORTED, "write nothing more")
    await refused(worker.publish(1), Code.ABORTED)
    await refused(worker.finish("platform_fault"), Code.ABORTED)
    unknown = worker.attempt.model_copy(update={"id": "att_unknown"})
    await refused(Worker(channel, unknown).commit(step(2)), Code.ABORTED, "no attempt")
    assert await state_of(system_engine, worker) == before
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


async def test_a_database_that_is_away_is_unavailable_so_that_the_worker_tries_again(clock: FakeClock) -> None:
    from finery_service.db.engine import create_engine

    engine = create_engine("postgresql://finery_system:x@127.0.0.1:1/none")
    attempt = AttemptRow(id="att_x", fence=1, tenant_id="t", job_id="j", kind="train", state="running")
    async with control.rpc(engine, control.SETTINGS, clock) as channel:
        await refused(Worker(channel, attempt).commit(step(1)), Code.UNAVAILABLE, "try again")
