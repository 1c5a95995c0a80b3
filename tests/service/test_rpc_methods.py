"""Steps and checkpoints of DPO and RL jobs, over a real server: what each may report, what is billed, what is told."""

from __future__ import annotations

import json
import math
from typing import Any

import grpc
import pytest
from sqlalchemy.ext.asyncio import AsyncEngine

from finery.types.environments import EnvironmentRunCreate
from finery_service.db.engine import transaction
from finery_service.reconcile import audit
from finery_testing import control, factories
from finery_testing.clock import FakeClock
from finery_testing.control import (
    RL_USAGE,
    dpo_step,
    next_attempt,
    refused,
    rl_step,
)
from finery_testing.control_fixtures import Launched

pytest_plugins = ("finery_testing.control_fixtures",)

Code = grpc.StatusCode


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
    launched: Launched, system_engine: AsyncEngine, clock: FakeClock
) -> None:
    worker = await launched("rl", hyperparameters={"eval_prompts": 4})
    await worker.begin()
    await worker.commit(rl_step(0, evaluation=0.1, prefix=worker.prefix), rl_step(1, prefix=worker.prefix))
    await worker.publish(1, validation_reward=0.25)
    await worker.commit(rl_step(2, evaluation=0.3, prefix=worker.prefix), rl_step(3, prefix=worker.prefix))
    second = await next_attempt(worker, system_engine, clock, 1)
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
