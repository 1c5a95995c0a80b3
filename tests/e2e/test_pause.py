"""Pause and resume: the slot is free meanwhile, nothing is paid twice, and the weights are those of a run in one go."""

from __future__ import annotations

import os
import signal

import pytest

from finery import Finery
from finery.types.files import File
from finery.types.jobs import Job
from finery_testing.stack import Stack

from .jobs import LONG, adapter_sha256, attempts, create, processes_naming, short, stream_until_step, succeeded, verify

pytestmark = pytest.mark.e2e
STEPS, EVERY = int(LONG["max_steps"]), int(LONG["checkpoint_every"])


def long(client: Finery, training_file: File) -> Job:
    return create(client, training_file.id)


@pytest.fixture(scope="module")
def in_one_go(client: Finery, training_file: File) -> str:
    """sha256 of its adapter."""
    job = succeeded(client, long(client, training_file))
    return adapter_sha256(client, job.id)


def until_paused(stack: Stack, client: Finery, job: Job) -> Job:
    stack.until(lambda: client.jobs.retrieve(job.id).state == "paused", 60, f"{job.id} is paused")
    return client.jobs.retrieve(job.id)


def worker(client: Finery, job: Job) -> str:
    """The attempt that trains it. Reads the history up to now."""
    started = [e.data for e in client.jobs.events(job.id, limit=100) if e.type == "attempt"]
    return str([data for data in started if data["kind"] == "train" and data["phase"] == "started"][-1]["attempt"])


def check_resumed(client: Finery, job: Job, in_one_go: str) -> None:
    client.jobs.resume(job.id)
    client.jobs.wait(job.id, timeout=120)
    verify(client, job.id, STEPS)
    assert adapter_sha256(client, job.id) == in_one_go
    numbers = [event.data["number"] for event in attempts(client, job.id) if event.data["kind"] == "train"]
    assert numbers == [1, 2]


def test_a_pause_gives_the_slot_to_another_job_and_a_resume_ends_as_if_nothing_had_been(
    stack: Stack, client: Finery, training_file: File, in_one_go: str
) -> None:
    job = long(client, training_file)
    stream_until_step(client, job.id, 30)
    attempt = worker(client, job)
    other = short(client, training_file.id)
    assert client.jobs.pause(job.id).intent == "pause"
    job = until_paused(stack, client, job)
    assert (job.reason, job.message) == ("paused_by_customer", "The job was paused on request.")
    (*_, checkpoint) = client.checkpoints.list(job=job.id)
    assert checkpoint.step == job.progress.step >= 30, "what was done is stored"
    assert not checkpoint.final
    (row,) = client.usage.list(job=job.id, group_by=["sku"])
    assert (row.provisional, row.billable) == (0, job.usage["train.sft"])
    stack.until(lambda: not processes_naming(attempt), 30, "no process of the attempt is left")
    succeeded(client, other)
    assert client.jobs.pause(job.id).state == "paused", "a second pause answers the same"
    check_resumed(client, job, in_one_go)


def test_a_paused_job_is_cancelled_at_once_and_keeps_its_checkpoint(
    stack: Stack, client: Finery, training_file: File
) -> None:
    job = long(client, training_file)
    stream_until_step(client, job.id, 5)
    client.jobs.pause(job.id)
    paused = until_paused(stack, client, job)
    client.jobs.cancel(job.id)
    job = client.jobs.wait(job.id, timeout=30, raise_on_failure=False)
    assert (job.state, job.reason) == ("cancelled", "cancelled_by_customer")
    assert (job.usage, job.cost, job.progress) == (paused.usage, paused.cost, paused.progress)
    assert adapter_sha256(client, job.id)
    assert len(attempts(client, job.id)) == 2, "one to prepare, one to train"


@pytest.mark.slow
def test_a_worker_is_killed_while_it_pauses(stack: Stack, client: Finery, training_file: File, in_one_go: str) -> None:
    job = long(client, training_file)
    stream_until_step(client, job.id, 30)
    (pid,) = processes_naming(worker(client, job))
    os.kill(pid, signal.SIGSTOP)  # so that it cannot have paused before it dies
    client.jobs.pause(job.id)
    os.kill(pid, signal.SIGKILL)
    job = until_paused(stack, client, job)
    (*_, checkpoint) = client.checkpoints.list(job=job.id)
    assert (checkpoint.step, checkpoint.step % EVERY) == (job.progress.step, 0), "it rests at its last checkpoint"
    assert client.usage.list(job=job.id, group_by=["sku"])[0].provisional == 0
    check_resumed(client, job, in_one_go)


def test_the_reconciler_is_killed_while_a_worker_pauses(
    stack: Stack, client: Finery, training_file: File, in_one_go: str
) -> None:
    job = long(client, training_file)
    stream_until_step(client, job.id, 30)
    client.jobs.pause(job.id)
    killed = stack.kill("reconcile")
    job = until_paused(stack, client, job)
    stack.until(lambda: stack.state["pids"].get("reconcile") not in (None, killed), 30, "another one is started")
    check_resumed(client, job, in_one_go)
