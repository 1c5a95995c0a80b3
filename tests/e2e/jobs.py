"""What the end-to-end tests ask of a finished job."""

from __future__ import annotations

import hashlib
import tempfile
from pathlib import Path
from typing import Any

import psutil

from finery import Finery
from finery.types.errors import ErrorDetail
from finery.types.jobs import Event, Job

LONG = {
    "max_steps": 300,
    "batch_tokens": 256,
    "max_length": 256,
    "learning_rate": 3e-3,
    "checkpoint_every": 20,
}


def create(client: Finery, training_file: str, **overrides: object) -> Job:
    hyperparameters = {**LONG, **overrides}
    return client.jobs.create(method="sft", model="tiny", training_file=training_file, hyperparameters=hyperparameters)


def short(client: Finery, training_file: str, **fields: Any) -> Job:
    """A job of a few steps: `fields` are those of a job, over these."""
    hyperparameters = {"max_steps": 8, "batch_tokens": 256, "max_length": 256, "learning_rate": 1e-2}
    given = fields.pop("hyperparameters", {})
    start = {} if "from_checkpoint" in fields else {"model": "tiny"}
    return client.jobs.create(
        method="sft", training_file=training_file, hyperparameters={**hyperparameters, **given}, **{**start, **fields}
    )


def succeeded(client: Finery, job: Job) -> Job:
    job = client.jobs.wait(job.id, timeout=120, raise_on_failure=False)
    assert job.state == "succeeded", (job.state, job.reason, job.error)
    return job


def failed(client: Finery, job: Job) -> ErrorDetail:
    """Its error; it never took an accelerator, and costs nothing."""
    job = client.jobs.wait(job.id, timeout=120, raise_on_failure=False)
    assert job.state == "failed"
    assert not job.usage
    assert job.cost == job.attempts == 0
    assert job.error is not None
    assert not list(client.checkpoints.list(job=job.id))
    return job.error


def held_out_losses(client: Finery, job: Job) -> dict[int, float]:
    """By step."""
    return {event.data["step"]: event.data["loss"] for event in client.jobs.stream(job.id) if event.type == "eval"}


def stream_until_step(client: Finery, job: str, step: int) -> list[Event]:
    """Events up to the metric of `step`; the job must still be running then."""
    seen = []
    for event in client.jobs.stream(job):
        seen.append(event)
        if event.type == "metric" and event.data["step"] >= step:
            return seen
    raise AssertionError(f"the job ended before step {step}: {seen[-1].data}")


def verify(client: Finery, job_id: str, steps: int) -> Job:
    """History, steps, usage, cost and checkpoint agree, and every step is billed once."""
    events = list(client.jobs.stream(job_id))
    assert [event.seq for event in events] == list(range(1, len(events) + 1))
    metrics = [event.data for event in events if event.type == "metric"]
    assert [metric["step"] for metric in metrics] == list(range(1, steps + 1))
    job = client.jobs.retrieve(job_id)
    assert job.state == "succeeded", (job.state, job.reason, job.error)
    assert job.progress.step == job.progress.total_steps == steps
    trained = sum(metric["trained_tokens"] for metric in metrics)
    (row,) = [row for row in client.usage.list(job=job_id, group_by=["sku"]) if row.sku == "train.sft"]
    assert row.quantity == row.billable == trained == job.usage["train.sft"] == job.progress.trained_tokens
    assert row.provisional == 0
    assert sum(event.data["to"] == "succeeded" for event in events if event.type == "state") == 1
    last = list(client.checkpoints.list(job=job_id))[-1]
    assert last.final
    assert last.step == steps
    return job


def attempts(client: Finery, job_id: str) -> list[Event]:
    started = (event for event in client.jobs.stream(job_id) if event.type == "attempt")
    return [event for event in started if event.data["phase"] == "started"]


def adapter_sha256(client: Finery, job_id: str) -> str:
    last = list(client.checkpoints.list(job=job_id))[-1]
    folder = Path(client.checkpoints.download(last.id, tempfile.mkdtemp()))
    return hashlib.sha256((folder / "adapter_model.safetensors").read_bytes()).hexdigest()


def processes_naming(attempt: str) -> list[int]:
    """A worker's process is titled by its attempt."""
    running = psutil.process_iter(["cmdline"])
    return [process.pid for process in running if any(attempt in part for part in process.info["cmdline"] or ())]
