"""Jobs to which anything happens in any order: however they end, they are billed once and right, and end once."""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass, field
from random import Random

import grpc
import pytest
from sqlalchemy.ext.asyncio import AsyncEngine
from sqlmodel import select

from finery.types.jobs import TERMINAL, Intent
from finery_protos.v1 import worker_pb2 as pb
from finery_service.db.engine import transaction
from finery_service.db.tables import CheckpointRow, RolloutFileRow, UsageRecordRow
from finery_service.reconcile import lease, loop
from finery_service.reconcile.context import Context
from finery_testing import control
from finery_testing.clock import FakeClock
from finery_testing.control import RL_USAGE, Worker, rl_step, step
from finery_testing.pool import ScriptedPool
from finery_testing.reconciling import SETTINGS, a_job, audited, due_again, intend, lead

pytest_plugins = ("finery_testing.control_fixtures",)

_TOTAL, _TOKENS = 4, 100
_USAGE = {"sft": {"train.sft": _TOKENS}, "rl": RL_USAGE}
"""Of one step, by method."""
_WEIGHTS = {
    "tick": 8, "begin": 5, "heartbeat": 1, "commit": 8, "publish": 3, "publish_final": 2, "succeed": 3, "finish": 1,
    "pause": 1, "resume": 2, "cancel": 0.15, "lose": 0.5, "die": 0.5, "wait": 2,
}  # fmt: skip
_REASONS = ("paused_by_customer", "cancelled_by_customer", "platform_fault")


@dataclass
class Walk:
    """One job, and every worker that ever spoke for it: those that were fenced off go on speaking."""

    context: Context
    pool: ScriptedPool
    channel: grpc.aio.Channel
    job: str
    random: Random
    method: str
    taken: list[str] = field(default_factory=list)

    async def go(self, steps: int) -> None:
        for _ in range(steps):
            [name] = self.random.choices(list(_WEIGHTS), list(_WEIGHTS.values()))
            self.taken.append(name)
            try:
                await getattr(self, name)()
            except grpc.aio.AioRpcError as error:
                if error.code() not in (grpc.StatusCode.ABORTED, grpc.StatusCode.FAILED_PRECONDITION):
                    raise AssertionError(self.taken) from error

    async def worker(self) -> Worker | None:
        """Mostly the latest one."""
        attempts = await control.attempts(self.context.engine, self.job)
        if not attempts:
            return None
        return Worker(self.channel, attempts[-1] if self.random.random() < 0.85 else self.random.choice(attempts))

    async def tick(self) -> None:
        assert self.context.leadership is not None
        await lease.acquire(self.context.engine, self.context.leadership.holder, 30)  # it is still the leader
        await loop.tick(self.context)

    async def begin(self) -> None:
        if worker := await self.worker():
            await worker.begin()

    async def heartbeat(self) -> None:
        if worker := await self.worker():
            await worker.heartbeat()

    async def commit(self) -> None:
        if worker := await self.worker():
            first = worker.attempt.step + self.random.choice((0, 1, 1, 1, 1, 2))
            count = self.random.choice((1, 1, 2, 3))
            numbers = range(max(first, 1), min(max(first, 1) + count, _TOTAL + 1))
            await worker.commit(*(self.step(number, worker) for number in numbers or (1,)))

    def step(self, number: int, worker: Worker) -> pb.Step:
        return rl_step(number, prefix=worker.prefix) if self.method == "rl" else step(number, _TOKENS)

    async def publish(self) -> None:
        if worker := await self.worker():
            at = max(worker.attempt.step - self.random.choice((0, 0, 0, 1)), 1)
            await worker.publish(at, final=at == _TOTAL)

    async def publish_final(self) -> None:
        if worker := await self.worker():
            await worker.publish(max(worker.attempt.step, 1), final=True)

    async def finish(self) -> None:
        if worker := await self.worker():
            await worker.finish(self.random.choice(_REASONS))

    async def succeed(self) -> None:
        if worker := await self.worker():
            await worker.finish(self.random.choice(("completed", "stopped_early")))

    async def pause(self) -> None:
        await intend(self.context.engine, self.job, Intent.PAUSE)

    async def resume(self) -> None:
        await intend(self.context.engine, self.job, Intent.RUN)

    async def cancel(self) -> None:
        await intend(self.context.engine, self.job, Intent.CANCEL)

    async def lose(self) -> None:
        if worker := await self.worker():
            await control.expire_lease(self.context.engine, worker.attempt.id)

    async def die(self) -> None:
        if (worker := await self.worker()) and worker.attempt.id in self.pool.workers_:
            self.pool.workers_[worker.attempt.id] = "dead"

    async def wait(self) -> None:
        await due_again(self.context.engine)

    async def end(self) -> None:
        """Whatever state it is in, a cancel ends it: with no worker that answers, when its time is up."""
        await self.cancel()
        late = "update jobs set intent_at = intent_at - interval '10 minutes' where id = :id and intent_at is not null"
        await control.execute(self.context.engine, late, id=self.job)
        for _ in range(4):
            await self.tick()


async def check(walk: Walk) -> str:
    """What must hold of a job that has ended; returns its state."""
    engine = walk.context.engine
    job = await control.job_row(engine, walk.job)
    assert job.state in TERMINAL, walk.taken
    async with transaction(engine) as session:
        rows = (await session.exec(select(CheckpointRow).where(CheckpointRow.job_id == job.id))).all()
    last = max((row.step for row in rows), default=0)
    assert last == next((row.step for row in rows if row.id == job.last_checkpoint_id), 0), walk.taken
    used, of_step = await control.billed(engine, job.id), _USAGE[walk.method]
    billed = [(sku, f"step:{number}", count) for number in range(1, last + 1) for sku, count in of_step.items()]
    assert used.get("billable", []) == sorted(billed), walk.taken
    assert set(used) <= {"billable", "void"}, walk.taken
    assert job.usage == ({sku: last * count for sku, count in of_step.items()} if last else {}), walk.taken
    await check_rollouts(walk, last)
    if job.state == "succeeded":
        assert [row.step for row in rows if row.final] == [job.stopped_step or _TOTAL], walk.taken
    events = await control.events(engine, job.id)
    assert [event.seq for event in events] == list(range(1, len(events) + 1))
    ends = [event for event in events if event.type == "state" and event.data["to"] in TERMINAL]
    assert [event.data["to"] for event in ends] == [job.state], walk.taken
    told = Counter(event.data["step"] for event in events if event.type == "metric")
    assert set(told.values()) <= {1}, walk.taken
    return job.state


async def check_rollouts(walk: Walk, last: int) -> None:
    """Those that are kept are those that were trained on and billed, whoever sampled others for the same step."""
    async with transaction(walk.context.engine) as session:
        kept = (await session.exec(select(RolloutFileRow).where(RolloutFileRow.job_id == walk.job))).all()
        paid = select(UsageRecordRow).where(UsageRecordRow.job_id == walk.job, UsageRecordRow.state == "billable")
        attempts = {row.step: row.attempt_id for row in (await session.exec(paid)).all()}
    found = {row.step: row.attempt_id for row in kept if row.step <= last}
    assert found == (attempts if walk.method == "rl" else {}), walk.taken


@pytest.mark.parametrize(
    "patience",
    [pytest.param(None, marks=pytest.mark.slow, id="to the last step"), pytest.param(1, id="early stopping")],
)
async def test_e10_e11_whatever_happens_every_step_is_billed_once_and_the_job_ends_once(
    system_engine: AsyncEngine, pool: ScriptedPool, clock: FakeClock, patience: int | None
) -> None:
    context = await lead(system_engine, pool, clock)
    ended: Counter[str] = Counter()
    async with control.rpc(system_engine, SETTINGS, clock) as channel:
        for seed in range(20):
            method = "rl" if seed % 2 else "sft"
            job = await a_job(system_engine, clock, method=method, total_steps=_TOTAL, prepared_prefix="p/")
            hyper = "update jobs set spec = jsonb_set(spec, '{hyperparameters,early_stopping_patience}', :value)"
            await control.execute(system_engine, hyper.replace(":value", f"'{patience or 'null'}'"))
            walk = Walk(context, pool, channel, job.id, Random(seed), method)
            await walk.go(80)
            await walk.end()
            ended[await check(walk)] += 1
            frozen = await control.job_row(system_engine, job.id)
            await walk.go(10)  # zombies, and customers who change their minds
            assert await control.job_row(system_engine, job.id) == frozen, walk.taken
            assert await audited(system_engine, pool) == []
    assert ended["cancelled"] > 1 < ended["succeeded"], f"else the walks prove little: {ended}"
