"""What is forwarded, when, and once."""

from __future__ import annotations

import math
import os
import subprocess
import sys
from collections.abc import Mapping
from datetime import datetime
from pathlib import Path
from typing import Any

import pytest

from finery import JobFailedError
from finery.forward import Recorder, measured, settings
from finery.types.jobs import Event, Job

from .forwarded import EVENTS, HELD_OUT, LOSSES, SPEC, running, same
from .support import Client, client_of, event_json, job_json, value


class Memory:
    """A sink of our own, as a customer may write one."""

    def __init__(self) -> None:
        self.written: list[tuple[int, dict[str, float]]] = []
        self.opened: list[bool] = []
        self.closed: list[str | None] = []

    def open(self, job: Job, settings: Mapping[str, Any], *, fresh: bool) -> None:
        self.opened.append(fresh)

    def write(self, values: Mapping[str, float], step: int, time: datetime) -> None:
        self.written.append((step, dict(values)))

    def close(self, job: Job | None) -> None:
        self.closed.append(None if job is None else str(job.state))


async def test_every_metric_and_evaluation_is_written_once_over_a_cut(kind: Client) -> None:
    sink = Memory()
    with running() as server:
        job = await value(client_of(kind, server).jobs.forward("job_1", to=sink))
        assert len([seen for seen in server.seen if "/events" in seen.path]) == 2, "the stream was cut"
    assert (job.state, sink.opened, sink.closed) == ("succeeded", [True], ["succeeded"])
    losses = [(step, values["train/loss"]) for step, values in sink.written if "train/loss" in values]
    assert same(losses, LOSSES)
    assert [(s, v["validation/loss"]) for s, v in sink.written if "validation/loss" in v] == HELD_OUT
    assert sink.written[1] == (1, {"train/loss": 3.5, "train/learning_rate": 1e-4, "train/cost": 0.000012})


async def test_from_a_cursor_only_what_is_behind_it_is_written(kind: Client) -> None:
    sink = Memory()
    with running() as server:
        await value(client_of(kind, server).jobs.forward("job_1", to=sink, after=4))
    assert ([step for step, _ in sink.written], sink.opened) == ([2, 3], [False])


async def test_what_breaks_off_is_closed_and_says_where_to_go_on(kind: Client) -> None:
    class Full(Memory):
        def write(self, values: Mapping[str, float], step: int, time: datetime) -> None:
            if step == 2:
                raise OSError("disk full")
            super().write(values, step, time)

    sink = Full()
    with running() as server, pytest.raises(OSError, match="disk full") as caught:
        await value(client_of(kind, server).jobs.forward("job_1", to=sink))
    assert sink.closed == [None]
    assert caught.value.__notes__ == ["Forwarded up to event 3; go on with after=3."]


async def test_a_job_that_fails_is_forwarded_to_its_end_and_not_raised(kind: Client) -> None:
    sink = Memory()
    with running("failed") as server:
        client = client_of(kind, server)
        assert (await value(client.jobs.forward("job_1", to=sink))).state == "failed"
        with pytest.raises(JobFailedError):
            await value(client.jobs.wait("job_1"))
    assert sink.closed == ["failed"]


def test_infinities_and_what_is_no_number() -> None:
    data: dict[str, Any] = {"step": 1, "loss": None, "note": "text", "nested": {"a": 1}, "flag": True}
    event = Event.model_validate(event_json(1, **data, non_finite={"loss": "-Infinity"}))
    assert measured(event) == {"train/loss": -math.inf}
    assert measured(Event.model_validate(event_json(1, "checkpoint", step=1, validation_loss=1.0))) == {}


def test_the_settings_are_the_spec_flat() -> None:
    found = settings(Job.model_validate(job_json(**SPEC)))
    assert (found["hyperparameters.learning_rate"], found["adapter.rank"], found["seed"]) == (0.0002, 16, 0)
    assert found["model"] == "smollm2-135m-instruct"


@pytest.mark.parametrize("name", ["tensorboard", "wandb", "mlflow"])
def test_a_tracker_that_is_not_installed_is_named_before_anything_is_written(name: str, tmp_path: Path) -> None:
    code = f"""
import sys; sys.modules[{name!r}] = None
from finery.forward import SINKS, Recorder
from finery.types.jobs import Job
assert not {{"tensorboard", "wandb", "mlflow", "torch"}} & {{m for m, v in sys.modules.items() if v is not None}}
sink = SINKS[{name!r}](*["runs"] * ({name!r} == "tensorboard"))
try:
    with Recorder(sink, Job.model_validate({job_json()!r})): pass
except ImportError as error: assert 'pip install "finery[{name}]"' in str(error), error; sys.exit(7)
"""
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=60, cwd=tmp_path)
    assert done.returncode == 7, done.stderr
    assert os.listdir(tmp_path) == []


def test_a_recorder_hears_an_event_once() -> None:
    sink = Memory()
    job = Job.model_validate(job_json())
    with Recorder(sink, job) as record:
        for event in (EVENTS[2], EVENTS[2], EVENTS[1]):
            record(Event.model_validate(event))
    assert ([step for step, _ in sink.written], record.cursor, sink.closed) == ([1], 3, [None])
