"""kill -9 in the middle of a job: it succeeds, steps are contiguous, each is billed once, weights are the same bits."""

from __future__ import annotations

import os
import signal

import pytest

from finery import Finery
from finery.types.files import File
from finery.types.jobs import Job
from finery_testing.stack import Stack

from .jobs import LONG, adapter_sha256, attempts, create, processes_naming, stream_until_step, verify

pytestmark = pytest.mark.e2e
STEPS = int(LONG["max_steps"])


@pytest.fixture(scope="module")
def uninterrupted(client: Finery, training_file: File) -> Job:
    job = create(client, training_file.id)
    verify(client, job.id, STEPS)
    assert len(attempts(client, job.id)) == 2, "one to prepare, one to train"
    return job


def test_the_worker_is_killed(stack: Stack, client: Finery, training_file: File, uninterrupted: Job) -> None:
    job = create(client, training_file.id)
    stream_until_step(client, job.id, 50)
    (_, training) = attempts_so_far(client, job.id)
    (pid,) = processes_naming(training)
    os.kill(pid, signal.SIGKILL)
    client.jobs.wait(job.id, timeout=120)
    verify(client, job.id, STEPS)
    assert len(attempts(client, job.id)) == 3, "a second attempt trained"
    assert adapter_sha256(client, job.id) == adapter_sha256(client, uninterrupted.id)


def attempts_so_far(client: Finery, job_id: str) -> list[str]:
    events = client.jobs.events(job_id, limit=100)
    return [
        str(event.data["attempt"]) for event in events if event.type == "attempt" and event.data["phase"] == "started"
    ]


@pytest.mark.parametrize("name", ["reconcile", pytest.param("api", marks=pytest.mark.slow), "rpc"])
def test_a_control_process_is_killed(
    name: str, stack: Stack, client: Finery, training_file: File, uninterrupted: Job
) -> None:
    job = create(client, training_file.id)
    stream_until_step(client, job.id, 50)
    killed = stack.kill(name)
    client.jobs.wait(job.id, timeout=120)
    verify(client, job.id, STEPS)
    assert stack.state["pids"][name] != killed, "the supervisor started it again"
    assert len(attempts(client, job.id)) == 2, "a healthy worker is not disturbed"
    assert adapter_sha256(client, job.id) == adapter_sha256(client, uninterrupted.id)


def test_up_is_killed_and_started_again(stack: Stack, client: Finery, training_file: File, uninterrupted: Job) -> None:
    job = create(client, training_file.id)
    stream_until_step(client, job.id, 50)
    stack.kill_up()
    stack.start()
    client.jobs.wait(job.id, timeout=180)
    verify(client, job.id, STEPS)
    assert adapter_sha256(client, job.id) == adapter_sha256(client, uninterrupted.id)
    assert client.jobs.retrieve(uninterrupted.id).state == "succeeded", "what was there is still there"
