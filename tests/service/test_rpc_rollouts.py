"""Rollouts that are kept, and what is told of a step, over a real server: those of the attempt that counts."""

from __future__ import annotations

import grpc
from sqlalchemy import text
from sqlalchemy.ext.asyncio import AsyncEngine
from sqlmodel import select

from finery_protos.v1 import worker_pb2 as pb
from finery_service.db.engine import transaction
from finery_service.rollouts.tables import RolloutFileRow
from finery_testing import control, factories
from finery_testing.clock import FakeClock
from finery_testing.control import (
    SHA,
    dpo_step,
    next_attempt,
    refused,
    rl_step,
    rollout_file,
    state_of,
)
from finery_testing.control_fixtures import Launched

pytest_plugins = ("finery_testing.control_fixtures",)

Code = grpc.StatusCode


async def kept(engine: AsyncEngine, job: str) -> dict[tuple[str, int], RolloutFileRow]:
    async with transaction(engine) as session:
        rows = (await session.exec(select(RolloutFileRow).where(RolloutFileRow.job_id == job))).all()
    return {(row.kind, row.step): row for row in rows}


NOTICES = (
    pb.Notice(type="warning", data_json='{"code": "slow_rewards", "message": "expected …"}'),
    pb.Notice(type="rollout", data_json='{"prompt": 3, "text": "nul \\u0000", "reward": null, "step": 99}'),
)


async def test_notices_become_events_of_their_step_after_its_numbers(
    launched: Launched, system_engine: AsyncEngine
) -> None:
    worker = await launched("rl")
    await worker.begin()
    await worker.commit(*(rl_step(number, notices=NOTICES) for number in (1, 2)))
    history = await control.events(system_engine, worker.attempt.job_id)
    assert [event.type for event in history[1:]] == ["metric", "warning", "rollout"] * 2
    for number, (_, warning, rollout) in enumerate((history[1:4], history[4:7]), start=1):
        assert warning.data == {"code": "slow_rewards", "message": "expected …", "step": number}
        assert rollout.data == {"prompt": 3, "text": "nul \ufffd", "reward": None, "step": number}


async def test_steps_that_are_done_again_keep_the_later_rollouts_and_tell_nothing_twice(
    launched: Launched, system_engine: AsyncEngine, clock: FakeClock
) -> None:
    worker = await launched("rl", hyperparameters={"eval_prompts": 4})
    await worker.begin()
    await worker.commit(*(rl_step(number, prefix=worker.prefix, notices=NOTICES) for number in (1, 2)))
    await worker.publish(1)
    job = worker.attempt.job_id
    assert {row.attempt_id for row in (await kept(system_engine, job)).values()} == {worker.attempt.id}
    second = await next_attempt(worker, system_engine, clock, 1)
    again = rl_step(2, prefix=second.prefix, notices=NOTICES)
    await second.commit(again, rl_step(3, evaluation=0.4, prefix=second.prefix))
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
    history = await control.events(system_engine, job)
    told = [(event.type, event.data["step"]) for event in history if event.type in ("metric", "warning", "rollout")]
    assert told == [(type_, step) for step in (1, 2) for type_ in ("metric", "warning", "rollout")] + [("metric", 3)]


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
