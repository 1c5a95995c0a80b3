"""RL on the tiny model with a customer's reward file: billed is what was done, also when processes are killed."""

from __future__ import annotations

import json
import os
import signal
from contextlib import suppress
from typing import Any

import psutil
import pytest

from finery import Finery
from finery.types.environments import Environment
from finery.types.jobs import Job
from finery.types.rollouts import Rollout
from finery_testing.stack import Stack

from .jobs import adapter_sha256, attempts, processes_naming, stream_until_step

pytestmark = pytest.mark.e2e
# Slow enough that something can be killed in the middle of a step.
SOURCE = """
import time

def grade(sample, item):
    time.sleep(0.04)
    text = sample["output_text"]
    kinds = len(set(text)) / max(1, len(text))
    return {"kinds": kinds, "short": -0.05 * len(text), "word": float(item["word"] in text)}
"""
STEPS, PROMPTS, SAMPLES = 10, 2, 4
HYPERPARAMETERS = {
    "steps": STEPS,
    "prompts_per_step": PROMPTS,
    "samples_per_prompt": SAMPLES,
    "max_new_tokens": 8,
    "learning_rate": 1e-2,
    "checkpoint_every": 4,
    "eval_prompts": 2,
    "eval_samples": 2,
}


@pytest.fixture(scope="module")
def environment(client: Finery, tmp_path_factory: pytest.TempPathFactory) -> Environment:
    rows = [{"messages": [{"role": "user", "content": f"Say {n}"}], "word": str(n)} for n in range(12)]
    path = tmp_path_factory.mktemp("rows") / "prompts.jsonl"
    path.write_text("".join(json.dumps(row) + "\n" for row in rows), encoding="utf-8")
    file = client.files.upload(path)
    made: Environment = client.environments.create(
        type="prompts", file=file.id, grader={"type": "python", "source": SOURCE}
    )
    return made


def create(client: Finery, environment: Environment, **hyperparameters: Any) -> Job:
    hyper = HYPERPARAMETERS | hyperparameters
    return client.jobs.create(method="rl", model="tiny", environment=environment.id, hyperparameters=hyper)


def rollouts(client: Finery, job: Job, **which: Any) -> list[Rollout]:
    return list(client.jobs.rollouts(job.id, **which))


def verify(client: Finery, job_id: str) -> Job:
    """Every rollout is kept once, and the bill is made of nothing but rollouts."""
    job = client.jobs.wait(job_id, timeout=120, raise_on_failure=False)
    assert job.state == "succeeded", (job.state, job.reason, job.error)
    events = list(client.jobs.stream(job.id))
    assert [event.seq for event in events] == list(range(1, len(events) + 1))
    metrics = [event.data for event in events if event.type == "metric"]
    assert [one["step"] for one in metrics] == list(range(1, STEPS + 1))
    kept = rollouts(client, job)
    assert [one.step for one in kept] == [step for step in range(1, STEPS + 1) for _ in range(PROMPTS * SAMPLES)]
    assert len({one.id for one in kept}) == len(kept), "ids are distinct"
    assert all(len(one.tokens) == len(one.log_probs) == len(one.versions) for one in kept)
    assert all(one.versions == (one.step - 1,) * len(one.tokens) for one in kept), "sampled by the step's weights"
    graded = [one for one in kept if one.reward is not None]
    firsts = [one for one in kept if one.sample == 0]
    held_out = rollouts(client, job, kind="eval")
    bill = {row.sku: row for row in client.usage.list(job=job.id, group_by=["sku"])}
    expected = {
        "rollout.prefill": sum(len(one.prompt_tokens) for one in firsts),
        "rollout.prefill_cached": sum(len(one.prompt_tokens) for one in kept if one.sample > 0),
        "rollout.generated": sum(len(one.tokens) for one in graded),
        "train.rl": sum(len(one.tokens) for one in kept if one.trained),
        "eval.rl": sum(len(one.tokens) for one in held_out),
    }
    assert {sku: bill[sku].billable for sku in expected} == expected
    assert not any(row.provisional for row in bill.values())
    assert sum(one["trained_tokens"] for one in metrics) == expected["train.rl"] == job.progress.trained_tokens > 0
    return job


def told(one: Rollout) -> dict[str, Any]:
    """Of a rollout, what does not depend on the clock."""
    return one.model_dump(exclude={"job", "seconds"})


@pytest.fixture(scope="module")
def uninterrupted(client: Finery, environment: Environment) -> Job:
    job = verify(client, create(client, environment).id)
    assert len(attempts(client, job.id)) == 2, "one to prepare, one to train"
    return job


def same(client: Finery, job: Job, other: Job) -> None:
    assert adapter_sha256(client, job.id) == adapter_sha256(client, other.id)
    assert list(map(told, rollouts(client, job))) == list(map(told, rollouts(client, other)))
    skus = ("rollout.prefill", "rollout.prefill_cached", "rollout.generated", "train.rl", "eval.rl")
    assert {sku: job.usage[sku] for sku in skus} == {sku: other.usage[sku] for sku in skus}


def running_worker(client: Finery, job: Job) -> int:
    stream_until_step(client, job.id, 6)
    training = [event.data["attempt"] for event in client.jobs.events(job.id, limit=100) if event.type == "attempt"]
    (pid,) = processes_naming(str(training[-1]))
    return pid


def test_the_worker_is_killed(client: Finery, environment: Environment, uninterrupted: Job) -> None:
    job = create(client, environment)
    os.kill(running_worker(client, job), signal.SIGKILL)
    job = verify(client, job.id)
    assert len(attempts(client, job.id)) == 3, "a second attempt trained"
    same(client, job, uninterrupted)


def test_the_reward_processes_are_killed(client: Finery, environment: Environment, uninterrupted: Job) -> None:
    job = create(client, environment)
    graders = psutil.Process(running_worker(client, job)).children(recursive=True)
    assert graders, "customers' code runs in processes of its own"
    for one in graders:
        with suppress(psutil.NoSuchProcess):  # it died with its keeper, or its call was over
            one.kill()
    job = verify(client, job.id)
    assert len(attempts(client, job.id)) == 2, "the worker went on"
    same(client, job, uninterrupted)


@pytest.mark.slow
def test_a_pause_changes_nothing(stack: Stack, client: Finery, environment: Environment, uninterrupted: Job) -> None:
    job = create(client, environment)
    stream_until_step(client, job.id, 3)
    client.jobs.pause(job.id)
    stack.until(lambda: client.jobs.retrieve(job.id).state == "paused", 60, f"{job.id} is paused")
    client.jobs.resume(job.id)
    job = verify(client, job.id)
    assert len(attempts(client, job.id)) == 3, "a second attempt trained"
    same(client, job, uninterrupted)
