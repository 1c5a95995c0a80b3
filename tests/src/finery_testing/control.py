"""Questions that tests of the control plane ask the database, and the worker's side of the RPC."""

from __future__ import annotations

from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import grpc
import pytest
from pydantic import SecretStr
from sqlalchemy import text
from sqlalchemy.ext.asyncio import AsyncEngine
from sqlmodel import col, select

from finery.types import data
from finery_protos.v1 import worker_pb2 as pb
from finery_protos.v1.worker_pb2_grpc import WorkersStub
from finery_service.clock import Clock
from finery_service.db.engine import transaction
from finery_service.jobs.tables import AttemptRow, EventRow, JobRow
from finery_service.rpc.begin import output_prefix
from finery_service.rpc.tokens import attempt_token
from finery_service.rpc_server import build
from finery_service.settings import Settings
from finery_service.usage.tables import UsageRecordRow
from finery_testing import factories

if TYPE_CHECKING:
    from finery_protos.v1.worker_pb2_grpc import WorkersAsyncStub

SECRET = "worker-secret-for-tests"
SHA = "0" * 64
SETTINGS = Settings(worker_secret=SecretStr(SECRET), store_url="file:///objects", rpc_address="127.0.0.1:9")


async def job_row(engine: AsyncEngine, job: str) -> JobRow:
    async with transaction(engine) as session:
        return (await session.exec(select(JobRow).where(JobRow.id == job))).one()


async def attempts(engine: AsyncEngine, job: str) -> list[AttemptRow]:
    """By fence."""
    async with transaction(engine) as session:
        statement = select(AttemptRow).where(AttemptRow.job_id == job).order_by(col(AttemptRow.fence))
        return list((await session.exec(statement)).all())


async def events(engine: AsyncEngine, job: str, type_: str | None = None) -> list[EventRow]:
    """By seq."""
    async with transaction(engine) as session:
        statement = select(EventRow).where(EventRow.job_id == job).order_by(col(EventRow.seq))
        return [event for event in (await session.exec(statement)).all() if type_ in (None, event.type)]


async def billed(engine: AsyncEngine, job: str) -> dict[str, list[tuple[str, str, int]]]:
    """State -> sorted (SKU, unit, quantity)."""
    async with transaction(engine) as session:
        rows = (await session.exec(select(UsageRecordRow).where(UsageRecordRow.job_id == job))).all()
    states = sorted({row.state for row in rows})
    return {state: sorted((row.sku, row.unit, row.quantity) for row in rows if row.state == state) for state in states}


async def usage(engine: AsyncEngine, job: str) -> list[tuple[str, str, int]]:
    """(unit, state, quantity) in order of recording."""
    async with transaction(engine) as session:
        statement = select(UsageRecordRow).where(UsageRecordRow.job_id == job).order_by(col(UsageRecordRow.id))
        return [(row.unit, row.state, row.quantity) for row in (await session.exec(statement)).all()]


async def execute(engine: AsyncEngine, statement: str, **arguments: Any) -> None:
    """A plain statement as finery_system: how tests make time pass in the database."""
    async with transaction(engine) as session:
        await session.execute(text(statement), arguments)


async def expire_lease(engine: AsyncEngine, attempt: str) -> None:
    past = "update attempts set lease_expires_at = clock_timestamp() - interval '1 second' where id = :id"
    await execute(engine, past, id=attempt)


@asynccontextmanager
async def rpc(engine: AsyncEngine, settings: Settings, clock: Clock) -> AsyncIterator[grpc.aio.Channel]:
    """The real server on a free port, and a channel to it."""
    server, port = build(engine, settings.model_copy(update={"rpc_port": 0}), clock)
    await server.start()
    try:
        async with grpc.aio.insecure_channel(f"127.0.0.1:{port}") as channel:
            yield channel
    finally:
        await server.stop(0)


@dataclass
class Worker:
    """Speaks for one attempt, under its token."""

    channel: grpc.aio.Channel
    attempt: AttemptRow

    @property
    def prefix(self) -> str:
        return output_prefix(self.attempt)

    async def begin(self) -> pb.Assignment:
        return await self._stub.Begin(pb.BeginRequest(**self._who, code_version="test"), metadata=self._metadata)

    async def heartbeat(self) -> pb.Orders:
        return await self._stub.Heartbeat(pb.HeartbeatRequest(**self._who), metadata=self._metadata)

    async def prepared(self, **values: Any) -> pb.Orders:
        counts = {
            "prepared_prefix": f"{self.prefix}prepared/",
            "rows": 10,
            "tokens": 500,
            "trained_tokens": 200,
            "total_steps": 4,
            "total_trained_tokens": 400,
            "statistics_json": report().model_dump_json(),
        }
        request = pb.ReportPreparedRequest(**self._who, **{**counts, **values})
        return await self._stub.ReportPrepared(request, metadata=self._metadata)

    async def previewed(self, rows_json: str, warnings_json: str = "") -> pb.Orders:
        request = pb.ReportPreviewRequest(**self._who, rows_json=rows_json, warnings_json=warnings_json)
        return await self._stub.ReportPreview(request, metadata=self._metadata)

    async def graded(self, answers_json: str = "", prompts_json: str = "", count: int = 20) -> pb.Orders:
        request = pb.ReportEnvironmentRunRequest(
            **self._who, answers_json=answers_json, prompts_json=prompts_json, prompt_count=count
        )
        return await self._stub.ReportEnvironmentRun(request, metadata=self._metadata)

    async def commit(self, *steps: pb.Step) -> pb.Orders:
        return await self._stub.CommitSteps(pb.CommitStepsRequest(**self._who, steps=steps), metadata=self._metadata)

    async def publish(self, step: int, *, final: bool = False, **values: Any) -> pb.PublishCheckpointResponse:
        defaults: dict[str, Any] = {
            "prefix": f"{self.prefix}checkpoints/step-{step:08d}/",
            "files": [pb.CheckpointFile(path="adapter_model.safetensors", bytes=10, sha256=SHA)],
            "manifest_json": '{"seed": 0}',
            "resume_prefix": f"{self.prefix}resume/step-{step:08d}/",
            "resume_sha256": SHA,
            "kind": "adapter",
        }
        request = pb.PublishCheckpointRequest(**self._who, step=step, final=final, **{**defaults, **values})
        return await self._stub.PublishCheckpoint(request, metadata=self._metadata)

    async def finish(self, reason: str, error_json: str = "") -> pb.FinishResponse:
        request = pb.FinishRequest(**self._who, reason=reason, error_json=error_json)
        return await self._stub.Finish(request, metadata=self._metadata)

    @property
    def _stub(self) -> WorkersAsyncStub:
        return WorkersStub(self.channel)

    @property
    def _who(self) -> dict[str, Any]:
        return {"attempt_id": self.attempt.id, "fence": self.attempt.fence}

    @property
    def _metadata(self) -> tuple[tuple[str, str], ...]:
        token = attempt_token(SECRET, self.attempt.id, self.attempt.fence)
        return (("authorization", f"Bearer {token}"),)


async def next_attempt(worker: Worker, engine: AsyncEngine, clock: Clock, step: int) -> Worker:
    """The worker fails, and the next attempt begins after the checkpoint at `step`."""
    await worker.finish("platform_fault")
    job = await job_row(engine, worker.attempt.job_id)
    assert (job.state, job.step) == ("queued", step)
    fence = worker.attempt.fence + 1
    await execute(engine, "update jobs set state = 'starting', fence = :fence", fence=fence)
    values = {"fence": fence, "state": "starting", "step": step, "resumed_from_step": step, "granted_through": step}
    second = Worker(worker.channel, await factories.attempt(engine, job, now=clock(), **values))
    await second.begin()
    return second


def report(*warnings: data.Warning, **values: Any) -> data.DataReport:
    """What a prepare attempt found in ten good rows; `values` override the training set's."""
    counts = {"format": "chat", "rows": 10, "tokens": 500, "trained_tokens": 200, "dropped_rows": 0}
    lengths = {"truncated_rows": 0, "longest": 60, "shortest": 40}
    train = data.SetReport.model_validate({**counts, **lengths, "digest": SHA, **values})
    return data.DataReport(sets={"train": train}, warnings=warnings, tokenizer_sha256=SHA, vocab_size=261)


def step(number: int, tokens: int = 100, *, loss: float = 2.5, evaluation: float | None = None) -> pb.Step:
    """A step as the SFT loop reports it; step 0 holds an evaluation only."""
    usage = [] if number == 0 else [pb.Usage(sku="train.sft", unit=f"step:{number}", quantity=tokens)]
    made = pb.Step(step=number, usage=usage)
    if number > 0:
        made.metrics.update({"loss": loss, "trained_tokens": tokens, "learning_rate": 1e-4})
    if evaluation is not None:
        made.evaluation.CopyFrom(pb.Evaluation(loss=evaluation, tokens=7))
        made.usage.append(pb.Usage(sku="eval.sft", unit=f"eval:{number}", quantity=7))
    return made


def dpo_step(number: int, tokens: int = 100, *, evaluation: float | None = None, **results: float) -> pb.Step:
    """A step as the DPO loop reports it; `results` are those of its evaluation, next to the loss."""
    usage = [] if number == 0 else [pb.Usage(sku="train.dpo", unit=f"step:{number}", quantity=tokens)]
    made = pb.Step(step=number, usage=usage)
    if number > 0:
        made.metrics.update({"loss": 0.69, "margin": 0.1, "accuracy": 0.75, "trained_tokens": tokens})
    if evaluation is not None:
        made.evaluation.CopyFrom(pb.Evaluation(loss=evaluation, tokens=7, metrics=results))
        made.usage.append(pb.Usage(sku="eval.dpo", unit=f"eval:{number}", quantity=7))
    return made


RL_USAGE = {
    "train.rl": 100,
    "rollout.prefill": 40,
    "rollout.prefill_cached": 280,
    "rollout.generated": 120,
    "reward.cpu_seconds": 3,
    "reward.llm_input": 50,
    "reward.llm_output": 5,
}
"""Of one step."""


def rl_step(
    number: int, *, reward: float = 0.5, evaluation: float | None = None, prefix: str | None = None, **values: Any
) -> pb.Step:
    """A step as the RL loop reports it; `evaluation` is a reward; with `prefix` (the attempt's) its rollouts are kept
    below it. `values` are fields of the step."""
    made = pb.Step(step=number, **values)
    if number > 0:
        made.metrics.update({"reward": reward, "kl": 0.01, "trained_tokens": RL_USAGE["train.rl"]})
        made.usage.extend(pb.Usage(sku=sku, unit=f"step:{number}", quantity=count) for sku, count in RL_USAGE.items())
        if prefix is not None:
            made.rollouts.CopyFrom(rollout_file(f"{prefix}rollouts/train-{number:08d}.jsonl"))
    if evaluation is not None:
        results = {"reward": evaluation, "reward_low": evaluation - 0.1, "reward_high": evaluation + 0.1}
        made.evaluation.CopyFrom(pb.Evaluation(tokens=9, metrics=results))
        made.usage.append(pb.Usage(sku="eval.rl", unit=f"eval:{number}", quantity=9))
        made.usage.append(pb.Usage(sku="reward.cpu_seconds", unit=f"eval:{number}", quantity=1))
        if prefix is not None:
            made.evaluation_rollouts.CopyFrom(rollout_file(f"{prefix}rollouts/eval-{number:08d}.jsonl"))
    return made


def rollout_file(key: str, **values: Any) -> pb.RolloutFile:
    return pb.RolloutFile(**{"key": key, "sha256": SHA, "bytes": 10, "count": 2, **values})


async def refused(call: object, code: grpc.StatusCode, message: str | None = None) -> None:
    with pytest.raises(grpc.aio.AioRpcError, match=message) as caught:
        await call  # type: ignore[misc]
    assert caught.value.code() is code, caught.value.details()


async def state_of(engine: AsyncEngine, worker: Worker) -> tuple[object, ...]:
    """Everything that a call could change, the lease aside."""
    job = await job_row(engine, worker.attempt.job_id)
    rows = [row.model_dump(exclude={"lease_expires_at"}) for row in await attempts(engine, job.id)]
    used = await usage(engine, job.id)
    return job.model_dump(), rows, used, len(await events(engine, job.id))
