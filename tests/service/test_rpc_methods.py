"""Steps and checkpoints of DPO and RL jobs, over a real server: what each may report, what is billed, what is told."""

from __future__ import annotations

import json
import math
from typing import Any

import grpc
import pytest
from sqlalchemy import text
from sqlalchemy.ext.asyncio import AsyncEngine
from sqlmodel import select

from finery.types.environments import EnvironmentRunCreate
from finery_protos.v1 import worker_pb2 as pb
from finery_service.db.engine import transaction
from finery_service.reconcile import audit
from finery_service.rollouts.tables import RolloutFileRow
from finery_service.rpc import step_checks
from finery_service.rpc.checks import Refused
from finery_testing import control, factories
from finery_testing.clock import FakeClock
from finery_testing.control import RL_USAGE, SHA, Worker, dpo_step, refused, rl_step, rollout_file, state_of
from finery_testing.control_fixtures import Launched

pytest_plugins = ("finery_testing.control_fixtures",)

Code = grpc.StatusCode


async def kept(engine: AsyncEngine, job: str) -> dict[tuple[str, int], RolloutFileRow]:
    async with transaction(engine) as session:
        rows = (await session.exec(select(RolloutFileRow).where(RolloutFileRow.job_id == job))).all()
    return {(row.kind, row.step): row for row in rows}


async def succeed(
    channel: grpc.aio.Channel, engine: AsyncEngine, worker: Worker, clock: FakeClock, step: int
) -> Worker:
    """The worker fails, and the next attempt begins after the checkpoint at `step`."""
    await worker.finish("platform_fault")
    job = await control.job_row(engine, worker.attempt.job_id)
    assert (job.state, job.step) == ("queued", step)
    fence = worker.attempt.fence + 1
    await control.execute(engine, "update jobs set state = 'starting', fence = :fence", fence=fence)
    values = {"fence": fence, "state": "starting", "step": step, "resumed_from_step": step, "granted_through": step}
    second = Worker(channel, await factories.attempt(engine, job, now=clock(), **values))
    await second.begin()
    return second


async def test_begin_of_rl_hands_out_the_environment_and_no_file(launched: Launched) -> None:
    worker = await launched("rl")
    assignment = await worker.begin()
    assert json.loads(assignment.environment_json) == factories.GYM.model_dump(mode="json")
    assert (assignment.training_key, assignment.training_sha256, assignment.training_encoding) == ("", "", "")
    assert (assignment.validation_key, assignment.run_json) == ("", "")
    assert json.loads(assignment.spec_json)["method"] == "rl"
    assert assignment.model_name == factories.MODEL_NAME


async def test_begin_of_a_run_hands_out_its_answers_and_no_model(launched: Launched) -> None:
    request = EnvironmentRunCreate(prompts=2).model_dump(mode="json")
    worker = await launched("rl", "prepare", job_kind="run", model_id=None, run={"request": request})
    assignment = await worker.begin()
    assert json.loads(assignment.run_json) == request
    assert (assignment.model_name, assignment.model_source_json) == ("", "")
    await refused(worker.prepared(), Code.FAILED_PRECONDITION, "expected ReportEnvironmentRun")


async def test_the_whole_path_of_a_dpo_job_bills_each_step_once(launched: Launched, system_engine: AsyncEngine) -> None:
    worker = await launched("dpo")
    await worker.begin()
    await worker.commit(dpo_step(0, evaluation=0.69, accuracy=0.5, margin=math.nan))
    await worker.commit(*(dpo_step(number) for number in (1, 2, 3, 4)))
    await worker.publish(4, final=True)
    await worker.finish("completed")
    job = worker.attempt.job_id
    steps = [("train.dpo", f"step:{number}", 100) for number in (1, 2, 3, 4)]
    assert await control.billed(system_engine, job) == {"billable": [("eval.dpo", "eval:0", 7), *steps]}
    [evaluation] = await control.events(system_engine, job, "eval")
    assert evaluation.data == {
        "step": 0,
        "tokens": 7,
        "loss": 0.69,
        "accuracy": 0.5,
        "margin": None,
        "non_finite": {"margin": "NaN"},
    }
    [first, *_] = await control.events(system_engine, job, "metric")
    # By hand: 7 x 0.10 + 100 x 0.80 US dollars per million.
    assert (first.data["cost"], first.data["margin"], first.data["accuracy"]) == ("0.0000807", 0.1, 0.75)


async def test_no_step_of_rl_is_billed_twice_over_a_fault_with_all_its_skus(
    channel: grpc.aio.Channel, launched: Launched, system_engine: AsyncEngine, clock: FakeClock
) -> None:
    worker = await launched("rl", hyperparameters={"eval_prompts": 4})
    await worker.begin()
    await worker.commit(rl_step(0, evaluation=0.1, prefix=worker.prefix), rl_step(1, prefix=worker.prefix))
    await worker.publish(1, validation_reward=0.25)
    await worker.commit(rl_step(2, evaluation=0.3, prefix=worker.prefix), rl_step(3, prefix=worker.prefix))
    second = await succeed(channel, system_engine, worker, clock, 1)
    again = [rl_step(2, evaluation=0.3, prefix=second.prefix), rl_step(3), rl_step(4, evaluation=0.6)]
    await second.commit(*again)
    assert await second.commit(*again) is not None  # the answer was lost
    await second.publish(4, final=True)
    await second.finish("completed")
    job = worker.attempt.job_id
    found = await control.billed(system_engine, job)
    evaluated = [
        row
        for number in (0, 2, 4)
        for row in (("eval.rl", f"eval:{number}", 9), ("reward.cpu_seconds", f"eval:{number}", 1))
    ]
    steps = [(sku, f"step:{number}", count) for number in (1, 2, 3, 4) for sku, count in RL_USAGE.items()]
    assert found["billable"] == sorted(evaluated + steps)
    gone = [(sku, f"step:{number}", count) for number in (2, 3) for sku, count in RL_USAGE.items()]
    assert found["void"] == sorted([*gone, ("eval.rl", "eval:2", 9), ("reward.cpu_seconds", "eval:2", 1)])
    assert set(found) == {"billable", "void"}
    row = await control.job_row(system_engine, job)
    assert row.usage == {
        **{sku: 4 * count for sku, count in RL_USAGE.items()},
        "reward.cpu_seconds": 4 * RL_USAGE["reward.cpu_seconds"] + 3,
        "eval.rl": 27,
    }
    async with transaction(system_engine) as session:
        assert await audit.differences(session) == []


async def test_the_cost_of_an_rl_step_is_that_of_all_its_skus(launched: Launched, system_engine: AsyncEngine) -> None:
    worker = await launched("rl", hyperparameters={"eval_prompts": 4})
    await worker.begin()
    await worker.commit(rl_step(0, evaluation=0.1), rl_step(1))
    await worker.commit(rl_step(2))
    first, second = [
        event.data["cost"] for event in await control.events(system_engine, worker.attempt.job_id, "metric")
    ]
    # By hand, per million: 100 x 0.80 + 40 x 0.10 + 280 x 0.02 + 120 x 0.40 + 3 x 20 + 50 x 0.20 + 5 x 0.80 = 211.6
    # a step, and 9 x 0.40 + 1 x 20 = 23.6 for the evaluation before.
    assert (first, second) == ("0.0002352", "0.0004468")


async def test_steps_that_are_done_again_keep_the_later_rollouts_and_tell_nothing_twice(
    channel: grpc.aio.Channel, launched: Launched, system_engine: AsyncEngine, clock: FakeClock
) -> None:
    worker = await launched("rl", hyperparameters={"eval_prompts": 4})
    await worker.begin()
    notices = [
        pb.Notice(type="warning", data_json='{"code": "slow_rewards", "message": "expected …"}'),
        pb.Notice(type="rollout", data_json='{"prompt": 3, "text": "nul \\u0000", "reward": null, "step": 99}'),
    ]
    steps = [rl_step(number, prefix=worker.prefix, notices=notices) for number in (1, 2)]
    await worker.commit(*steps)
    await worker.publish(1)
    job = worker.attempt.job_id
    told = [
        (event.type, event.data)
        for event in await control.events(system_engine, job)
        if event.type in ("warning", "rollout")
    ]
    assert told == [
        row
        for number in (1, 2)
        for row in (
            ("warning", {"code": "slow_rewards", "message": "expected …", "step": number}),
            ("rollout", {"prompt": 3, "text": "nul \ufffd", "reward": None, "step": number}),
        )
    ]
    types = [event.type for event in await control.events(system_engine, job)]
    assert types[1:] == ["metric", "warning", "rollout", "metric", "warning", "rollout", "checkpoint"]
    before = await kept(system_engine, job)
    assert {key: row.attempt_id for key, row in before.items()} == dict.fromkeys(
        [("train", 1), ("train", 2)], worker.attempt.id
    )
    second = await succeed(channel, system_engine, worker, clock, 1)
    await second.commit(
        rl_step(2, prefix=second.prefix, notices=notices), rl_step(3, evaluation=0.4, prefix=second.prefix)
    )
    after = await kept(system_engine, job)
    assert {key: row.attempt_id for key, row in after.items()} == {
        ("train", 1): worker.attempt.id,
        ("train", 2): second.attempt.id,
        ("train", 3): second.attempt.id,
        ("eval", 3): second.attempt.id,
    }
    row = after["train", 2]
    assert (row.object_key, row.sha256) == (f"{second.prefix}rollouts/train-00000002.jsonl", SHA)
    assert (row.bytes, row.count, row.tenant_id) == (10, 2, second.attempt.tenant_id)
    again = await control.events(system_engine, job)
    assert [event.data["step"] for event in again if event.type in ("warning", "rollout")] == [1, 1, 2, 2]
    assert [event.data["step"] for event in again if event.type == "metric"] == [1, 2, 3]


async def test_rollouts_of_another_tenant_are_not_seen(
    launched: Launched, app_engine: AsyncEngine, system_engine: AsyncEngine, clock: FakeClock
) -> None:
    worker = await launched("rl")
    await worker.begin()
    await worker.commit(rl_step(1, prefix=worker.prefix))
    stranger = await factories.tenant(system_engine, now=clock())
    count = text("select count(*) from rollout_files")
    for tenant, seen in ((worker.attempt.tenant_id, 1), (stranger.id, 0)):
        async with transaction(app_engine, tenant) as session:
            assert (await session.execute(count)).scalar_one() == seen


USAGE = pb.Usage(sku="train.rl", unit="step:1", quantity=1)


@pytest.mark.parametrize(
    ("method", "bad", "message"),
    [
        (
            "dpo",
            pb.Step(step=1, usage=[pb.Usage(sku="train.sft", unit="step:1")]),
            "train.dpo, eval.dpo, found 'train.sft'",
        ),
        (
            "dpo",
            pb.Step(step=1, usage=[pb.Usage(sku="reward.cpu_seconds", unit="step:1")]),
            "found 'reward.cpu_seconds'",
        ),
        ("sft", pb.Step(step=1, usage=[pb.Usage(sku="rollout.prefill", unit="step:1")]), "found 'rollout.prefill'"),
        ("rl", pb.Step(step=1, usage=[pb.Usage(sku="train.dpo", unit="step:1")]), "eval.rl, found 'train.dpo'"),
        ("rl", pb.Step(step=1, usage=[USAGE, USAGE]), "each SKU once in a step, found train.rl twice"),
        ("rl", pb.Step(step=1, usage=[pb.Usage(sku="rollout.generated", unit="eval:1")]), "expected step:1"),
        ("rl", pb.Step(step=1, usage=[pb.Usage(sku="eval.rl", unit="step:1")]), "expected eval:1"),
        ("rl", pb.Step(step=1, usage=[pb.Usage(sku="reward.llm_input", unit="step:2")]), "expected step:1 or eval:1"),
        ("rl", pb.Step(step=0, usage=[pb.Usage(sku="reward.llm_input", unit="step:0")]), "steps from 1"),
        ("rl", pb.Step(step=1, evaluation=pb.Evaluation(loss=1.0)), "evaluation.loss: expected none of an RL job"),
        ("dpo", pb.Step(step=1, evaluation=pb.Evaluation(metrics={"accuracy": 1.0})), "evaluation.loss: expected one"),
        ("rl", pb.Step(step=1, evaluation=pb.Evaluation(metrics={"loss": 1.0})), "none of ours, found 'loss'"),
        ("rl", pb.Step(step=1, evaluation=pb.Evaluation(metrics={"tokens": 1.0})), "none of ours, found 'tokens'"),
        ("rl", pb.Step(step=1, evaluation=pb.Evaluation(metrics={"pass@1": 1.0})), "found 'pass@1'"),
        ("rl", pb.Step(step=1, evaluation=pb.Evaluation(tokens=-1)), "tokens: expected >= 0"),
        ("rl", pb.Step(step=1, evaluation_rollouts=pb.RolloutFile()), "expected the evaluation next to them"),
        ("rl", pb.Step(step=0, rollouts=pb.RolloutFile()), "step 0 holds only the evaluation"),
        ("rl", pb.Step(step=1, rollouts=pb.RolloutFile()), "rollouts.key: expected an object key below"),
        ("rl", pb.Step(step=1, rollouts=rollout_file("x/../y")), "rollouts.key: expected an object key below"),
        (
            "rl",
            pb.Step(step=1, notices=[pb.Notice(type="state", data_json="{}")]),
            "one of warning, rollout, found 'state'",
        ),
        (
            "rl",
            pb.Step(step=1, notices=[pb.Notice(type="rollout", data_json="[]")]),
            "expected a JSON object, found list",
        ),
        (
            "rl",
            pb.Step(step=1, notices=[pb.Notice(type="rollout", data_json='{"a": NaN}')]),
            "which JSON does not have",
        ),
        (
            "rl",
            pb.Step(step=1, notices=[pb.Notice(type="rollout", data_json='{"a": 1e999}')]),
            "a number that is too large",
        ),
        ("rl", pb.Step(step=1, notices=[pb.Notice(type="rollout", data_json="[" * 9000)]), "nested too deeply"),
        (
            "rl",
            pb.Step(step=1, notices=[pb.Notice(type="warning", data_json='{"code": "x"}')]),
            "with code and message",
        ),
        (
            "rl",
            pb.Step(
                step=1,
                notices=[pb.Notice(type="rollout", data_json=json.dumps({"text": "é" * 8192}, ensure_ascii=False))],
            ),
            "at most 16384 bytes, found 16396",
        ),
        (
            "rl",
            pb.Step(step=1, notices=[pb.Notice(type="rollout", data_json="{}")] * 33),
            "at most 32 in a step, found 33",
        ),
    ],
)
def test_what_a_method_does_not_have_is_refused(method: str, bad: pb.Step, message: str) -> None:
    def check() -> None:
        step_checks.check([bad])
        step_checks.check_against_job([bad], method, "ten_1/jobs/job_1/att_1/")

    with pytest.raises(Refused, match=message) as caught:
        check()
    assert caught.value.code is Code.INVALID_ARGUMENT


async def test_a_step_of_another_method_leaves_nothing(launched: Launched, system_engine: AsyncEngine) -> None:
    worker = await launched("rl")
    await worker.begin()
    before = await state_of(system_engine, worker)
    for bad in (dpo_step(1), rl_step(1, prefix="elsewhere/"), rl_step(1, notices=[pb.Notice(type="state")])):
        await refused(worker.commit(bad), Code.INVALID_ARGUMENT)
    assert await state_of(system_engine, worker) == before
    assert await kept(system_engine, worker.attempt.job_id) == {}


async def test_rollouts_lie_below_the_attempts_own_prefix_and_are_those_of_rl(launched: Launched) -> None:
    worker, other, sft = await launched("rl"), await launched("rl"), await launched("sft")
    await worker.begin()
    await sft.begin()
    await refused(worker.commit(rl_step(1, prefix=other.prefix)), Code.INVALID_ARGUMENT, "rollouts.key: expected")
    bad = rollout_file(f"{worker.prefix}a.jsonl", sha256="0" * 63)
    await refused(worker.commit(rl_step(1, rollouts=bad)), Code.INVALID_ARGUMENT, "rollouts.sha256: expected 64")
    for name in ("bytes", "count"):
        file = rollout_file(f"{worker.prefix}a.jsonl", **{name: -1})
        await refused(worker.commit(rl_step(1, rollouts=file)), Code.INVALID_ARGUMENT, f"{name}: expected >= 0")
    theirs = pb.Step(step=1, rollouts=rollout_file(f"{sft.prefix}a.jsonl"))
    await refused(sft.commit(theirs), Code.INVALID_ARGUMENT, "no RL job")


async def test_an_rl_job_prepares_prompts_without_a_trained_token(
    launched: Launched, system_engine: AsyncEngine
) -> None:
    worker = await launched("rl", "prepare", hyperparameters={"eval_prompts": 4})
    await worker.begin()
    counts = {"trained_tokens": 0, "total_steps": 50, "total_trained_tokens": 409_600}
    alone = control.report(trained_tokens=0, format="prompts")
    await refused(worker.prepared(**counts), Code.INVALID_ARGUMENT, "sets: expected train, validation, found train")
    both = alone.model_copy(update={"sets": dict.fromkeys(("train", "validation"), alone.sets["train"])})
    await worker.prepared(**counts, statistics_json=both.model_dump_json())
    job = await control.job_row(system_engine, worker.attempt.job_id)
    assert (job.state, job.total_steps, job.quote_tokens) == ("queued", 50, 409_600)
    [event] = await control.events(system_engine, job.id, "prepared")
    assert event.data["trained_tokens"] == 0


@pytest.mark.parametrize("method", ["sft", "dpo"])
async def test_no_other_job_goes_on_without_a_trained_token(launched: Launched, method: str) -> None:
    worker = await launched(method, "prepare")
    await worker.begin()
    await refused(worker.prepared(trained_tokens=0), Code.INVALID_ARGUMENT, "trained_tokens: expected at least 1")
    await worker.prepared()


async def test_a_validation_reward_is_kept_and_told_of_rl_with_held_out_prompts_only(
    launched: Launched, system_engine: AsyncEngine
) -> None:
    plain, held_out, dpo = (
        await launched("rl"),
        await launched("rl", hyperparameters={"eval_prompts": 2}),
        await launched("dpo"),
    )
    for worker in (plain, held_out, dpo):
        await worker.begin()
        await worker.commit(dpo_step(1) if worker is dpo else rl_step(1))
    for worker in (plain, dpo):
        await refused(worker.publish(1, validation_reward=1.0), Code.INVALID_ARGUMENT, "no eval_prompts")
    await refused(held_out.publish(1, validation_loss=1.0), Code.INVALID_ARGUMENT, "validation_loss: expected none")
    await refused(held_out.publish(1, validation_reward=math.inf), Code.INVALID_ARGUMENT, "a finite number or none")
    await held_out.publish(1, validation_reward=-0.5)
    [event] = await control.events(system_engine, held_out.attempt.job_id, "checkpoint")
    assert (event.data["validation_reward"], event.data["validation_loss"]) == (-0.5, None)


@pytest.mark.parametrize("hyperparameters", [{"target_reward": 0.9}, {"early_stopping_patience": 2}, {}])
async def test_rl_ends_early_by_its_target_or_its_patience(
    launched: Launched, system_engine: AsyncEngine, hyperparameters: dict[str, Any]
) -> None:
    worker = await launched("rl", hyperparameters={"eval_prompts": 2, **hyperparameters})
    await worker.begin()
    await worker.commit(rl_step(1, evaluation=0.95))
    if not hyperparameters:
        await refused(worker.publish(1, final=True), Code.FAILED_PRECONDITION, "expected it at step 4 and only there")
        return
    await worker.publish(1, final=True, validation_reward=0.95)
    await worker.finish("stopped_early")
    job = await control.job_row(system_engine, worker.attempt.job_id)
    assert (job.state, job.reason, job.stopped_step) == ("succeeded", "stopped_early", 1)


@pytest.mark.parametrize("reason", ["invalid_environment", "sandbox_unavailable", "rewards_failed"])
async def test_endings_of_environments_fail_the_job_with_their_error(
    launched: Launched, system_engine: AsyncEngine, reason: str
) -> None:
    worker = await launched("rl")
    await worker.begin()
    error = {"message": "expected …", "type": "invalid_request_error", "code": reason, "param": "environment"}
    await worker.finish(reason, json.dumps(error))
    job = await control.job_row(system_engine, worker.attempt.job_id)
    assert (job.state, job.reason, job.error) == ("failed", reason, error)
