"""DPO, RL, environments and rollouts: the client against the real API on a real database, in process."""

from __future__ import annotations

import asyncio
import hashlib
import json
from types import SimpleNamespace
from typing import Any

import pytest
from sqlmodel import select

from finery import (
    AsyncFinery,
    BadRequestError,
    ConflictError,
    EnvironmentRunFailedError,
    NotFoundError,
    WaitTimeoutError,
    graders,
)
from finery.types.environments import ReasoningGymEnvironment
from finery.types.jobs import JobState
from finery.types.methods import DpoHyperparameters, RlHyperparameters, RlJobCreate
from finery_service.db.engine import transaction
from finery_service.db.tables import JobRow
from finery_service.rollouts import store as rollout_files
from finery_testing import factories
from finery_testing.api import CHAT_ROW, Api, jsonl

from .real_app import client_with

GYM: dict[str, Any] = {"type": "reasoning_gym", "task": "chain_sum"}
GYM_SPEC = ReasoningGymEnvironment.model_validate(GYM)
CHECK = {"type": "string_check", "operation": "eq", "reference": "{{ item.answer }}"}
PAIR = {"messages": [{"role": "user", "content": "1 + 1?"}], "chosen": "2", "rejected": "3"}
PROMPTS = jsonl(*({"prompt": f"{n} + 1 =", "answer": str(n + 1)} for n in range(8)))
MODEL = factories.MODEL_NAME


async def test_a_dpo_job_is_created_typed_or_plain_and_wants_pairs(client: AsyncFinery) -> None:
    pairs = await client.files.upload(jsonl(PAIR, PAIR))
    assert (pairs.status, pairs.format) == ("valid", "preference")
    plain = {"beta": 0.2, "loss": "ipo", "max_steps": 2}
    for hyper in (plain, DpoHyperparameters.model_validate(plain)):
        job = await client.jobs.create(method="dpo", model=MODEL, training_file=pairs, hyperparameters=hyper)
        assert (job.method, job.training_file) == ("dpo", pairs.id)
        assert DpoHyperparameters.model_validate(job.hyperparameters).model_dump(include=set(plain)) == plain
    chat = await client.files.upload(jsonl(CHAT_ROW))
    for method, file in (("dpo", chat), ("sft", pairs)):
        with pytest.raises(BadRequestError) as caught:
            await client.jobs.create(method=method, model=MODEL, training_file=file)  # type: ignore[arg-type]
        assert (caught.value.code, caught.value.param) == ("wrong_task_format", "training_file")


async def test_an_rl_job_takes_an_environment_in_every_way(client: AsyncFinery) -> None:
    kept = await client.environments.create(**GYM, name="sums")
    hyper = RlHyperparameters(steps=3, prompts_per_step=2, samples_per_prompt=4)
    for environment in (kept, kept.id, GYM, GYM_SPEC):
        job = await client.jobs.create(method="rl", model=MODEL, environment=environment, hyperparameters=hyper)
        assert (job.method, job.training_file, job.environment_id) == (
            "rl",
            None,
            kept.id if environment in (kept, kept.id) else None,
        )
        assert job.environment is not None
        assert ReasoningGymEnvironment.model_validate(job.environment).task == "chain_sum"
        assert (job.hyperparameters["steps"], job.hyperparameters["algorithm"]) == (3, "grpo")


async def test_what_a_typed_request_leaves_out_is_fitted_to_the_model(real_api: Api, client: AsyncFinery) -> None:
    key = (await real_api.operator()).headers["authorization"].removeprefix("Bearer ")
    await client_with(real_api, key).models.create(
        name="short", source={"type": "path", "path": "/models/short"}, max_length=64
    )
    pairs = await client.files.upload(jsonl(PAIR))
    dpo = DpoHyperparameters(beta=0.2)
    job = await client.jobs.create(method="dpo", model="short", training_file=pairs, hyperparameters=dpo)
    assert job.hyperparameters["max_length"] == 64
    hyper = RlHyperparameters(steps=3)
    job = await client.jobs.create(RlJobCreate(method="rl", model="short", environment=GYM_SPEC, hyperparameters=hyper))
    assert job.hyperparameters["max_prompt_tokens"] + job.hyperparameters["max_new_tokens"] <= 64


async def test_a_wrong_combination_is_refused_and_named(client: AsyncFinery) -> None:
    pairs = await client.files.upload(jsonl(PAIR))
    fields: list[tuple[str, dict[str, Any]]] = [
        ("training_file", {"method": "rl", "environment": GYM, "training_file": pairs}),
        ("environment", {"method": "rl"}),
        ("environment", {"method": "dpo", "training_file": pairs, "environment": GYM}),
        ("training_file", {"method": "dpo"}),
        ("hyperparameters.steps", {"method": "dpo", "training_file": pairs, "hyperparameters": {"steps": 3}}),
        ("hyperparameters.beta", {"method": "rl", "environment": GYM, "hyperparameters": {"beta": 0.1}}),
        ("environment.task", {"method": "rl", "environment": {"type": "reasoning_gym"}}),
        ("method", {"method": "ppo", "environment": GYM}),
    ]
    for param, wrong in fields:
        with pytest.raises(BadRequestError, match=param) as caught:
            await client.jobs.create(model=MODEL, **wrong)
        assert caught.value.param == param


async def test_environments_are_kept_listed_and_deleted(client: AsyncFinery, tmp_path: Any) -> None:
    (tmp_path / "reward.py").write_text("def grade(sample, item):\n    return 1.0\n")
    prompts = await client.files.upload(PROMPTS)
    assert (prompts.status, prompts.format) == ("valid", "prompts")
    grader = graders.python(tmp_path / "reward.py", timeout_seconds=2)
    made = [
        await client.environments.create(type="prompts", file=prompts, grader=grader),
        await client.environments.create({"type": "prompts", "file": prompts, "grader": CHECK}, name="exact"),
        await client.environments.create(GYM_SPEC),
    ]
    assert made[0].spec["grader"]["source"] == grader.source
    listed = [one async for one in client.environments.list(project=made[0].project, limit=2)]
    assert sorted(one.id for one in listed) == sorted(one.id for one in made)
    assert await client.environments.get(made[1]) == made[1]
    with pytest.raises(ConflictError, match=made[0].id):
        await prompts.delete()
    for one in made:
        await one.delete()
    with pytest.raises(NotFoundError) as caught:
        await client.environments.retrieve(made[0])
    assert caught.value.code == "environment_not_found"
    await prompts.delete()


REPORT = {
    "prompt_count": 8,
    "prompts": [{"index": 0, "text": "0 + 1 =", "item": {"prompt": "0 + 1 =", "answer": "1"}}],
    "answers": [
        {"prompt": 0, "output_text": "1", "reward": 1.0, "parts": {"exact": 1.0}},
        {"prompt": 7, "output_text": "9", "failure": {"code": "timeout", "message": "Too long."}},
    ],
}


async def run_by_a_worker(api: Api, state: JobState, **found: Any) -> dict[str, Any]:
    """Wait for a run that is asked for, and end it as a worker does; what was asked."""
    while True:
        async with transaction(api.system_engine) as session:
            query = select(JobRow).where(JobRow.kind == "run", JobRow.state == "validating")
            row = (await session.exec(query)).first()
            if row is not None:
                asked: dict[str, Any] = (row.run or {})["request"]
                row.run = {**(row.run or {}), **REPORT}
                row.state, row.error = state.value, found.get("error")
                row.finished_at = api.clock()
                session.add(row)
                return asked
        await asyncio.sleep(0.02)


async def test_a_run_is_waited_for_until_a_worker_made_it(real_api: Api, client: AsyncFinery) -> None:
    prompts = await client.files.upload(PROMPTS)
    environment = await client.environments.create(type="prompts", file=prompts, grader=CHECK)
    waiting = asyncio.create_task(environment.run(["1", (7, "9")], prompts=1))
    asked = await run_by_a_worker(real_api, JobState.SUCCEEDED)
    assert asked == {"answers": [{"output_text": "1", "prompt": 0}, {"output_text": "9", "prompt": 7}], "prompts": 1}
    run = await waiting
    assert (run.environment, run.status, run.prompt_count) == (environment.id, "ready", 8)
    assert [answer.reward for answer in run.answers] == [1.0, None]
    assert run.answers[1].failure.code == "timeout"
    assert "1 reward, 1 without one: mean 1" in run.text(color=False)
    error = {"message": "No sandbox.", "type": "job_error", "code": "sandbox_unavailable"}
    waiting = asyncio.create_task(client.environments.run(environment.id))
    await run_by_a_worker(real_api, JobState.FAILED, error=error)
    with pytest.raises(EnvironmentRunFailedError, match=r"\(sandbox_unavailable\): No sandbox\."):
        await waiting
    with pytest.raises(WaitTimeoutError, match="no worker has come"):
        await client.environments.run(environment, "1", timeout=0.3)
    with pytest.raises(BadRequestError) as caught:
        await client.environments.run(environment, [(8, "beyond the last")])
    assert caught.value.param == "answers[0].prompt"


async def keep_rollouts(api: Api, job_id: str, steps: int, count: int) -> None:
    """As a worker uploads them, and as its steps name them."""
    async with transaction(api.system_engine) as session:
        job = (await session.exec(select(JobRow).where(JobRow.id == job_id))).one()
    attempt = await factories.attempt(api.system_engine, job, now=api.clock())
    for step in range(1, steps + 1):
        place = {"job": job_id, "step": step, "group": 0, "prompt": 3, "finish": "stop", "reward": 0.5, "tokens": [1]}
        rows = [{**place, "id": f"roll_{step}_{n}", "sample": n, "log_probs": [-0.5]} for n in range(count)]
        content = "".join(json.dumps(row) + "\n" for row in rows).encode()
        key = f"{job.tenant_id}/jobs/{job_id}/{attempt.id}/rollouts/train-{step}.jsonl"
        target = api.store_folder / key
        target.parent.mkdir(parents=True, exist_ok=True)
        target.write_bytes(content)
        file = SimpleNamespace(key=key, sha256=hashlib.sha256(content).hexdigest(), bytes=len(content), count=count)
        async with transaction(api.system_engine) as session:
            await rollout_files.put(session, job, attempt, "train", step, file, api.clock())


async def test_rollouts_are_read_page_by_page(real_api: Api, client: AsyncFinery) -> None:
    job = await client.jobs.create(method="rl", model=MODEL, environment=GYM)
    assert [one async for one in job.rollouts()] == []
    await keep_rollouts(real_api, job.id, steps=2, count=5)
    found = [one async for one in client.jobs.rollouts(job.id, step=1, limit=2)]
    assert [one.id for one in found] == [f"roll_1_{n}" for n in range(5)]
    assert (found[0].reward, found[0].tokens, found[0].log_probs) == (0.5, (1,), (-0.5,))
    assert [one.step async for one in job.rollouts()] == [1] * 5 + [2] * 5
    assert [one async for one in job.rollouts(kind="eval")] == []
    with pytest.raises(NotFoundError):
        _ = [one async for one in client.jobs.rollouts("job_0000000000000000000000000000000000")]
