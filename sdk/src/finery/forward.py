"""A job's metrics in TensorBoard, Weights & Biases or MLflow, through their own libraries.

    from finery.forward import TensorBoard

    client.jobs.forward(job, to=TensorBoard("runs"))

Each needs its extra: pip install "finery[tensorboard]", "finery[wandb]", "finery[mlflow]". Steps are the job's own.
After a lost worker a job goes on from its last checkpoint, so a step may be trained, and is then written, again.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator, Mapping
from datetime import datetime
from pathlib import Path
from types import TracebackType
from typing import Any, Protocol, Self

from finery.errors import FineryError
from finery.types.jobs import Event, Job

_PREFIX = {"metric": "train", "eval": "validation"}
_NO_METRICS = ("step", "total_steps")


class Sink(Protocol):
    """Where metrics go. One sink takes one job."""

    def open(self, job: Job, settings: Mapping[str, Any], *, fresh: bool) -> None:
        """Before the first metric. `settings`: the job's spec, flat; `fresh`: nothing of it was written before."""

    def write(self, values: Mapping[str, float], step: int, time: datetime) -> None:
        """What one event measured, under names such as `train/loss`."""

    def close(self, job: Job | None) -> None:
        """At the end. None: the job goes on, but its forwarding was broken off."""


class Recorder:
    """Hands every metric and eval event on to a sink, once: the `on_event` of `jobs.wait`. `cursor`: the last seq."""

    def __init__(self, sink: Sink, job: Job, after: int = 0) -> None:
        self.cursor = after
        self._sink = sink
        self._job = job
        self._ended: Job | None = None

    def __enter__(self) -> Self:
        self._sink.open(self._job, settings(self._job), fresh=self.cursor == 0)
        return self

    def __call__(self, event: Event) -> None:
        if event.seq <= self.cursor:
            return
        values = measured(event)
        if values:
            self._sink.write(values, int(event.data["step"]), event.created_at)
        self.cursor = event.seq

    def end(self, job: Job) -> Job:
        """Note the state that the job ended in; it is written when the recorder is left."""
        self._ended = job
        return job

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._sink.close(self._ended)
        if error is not None:
            error.add_note(f"Forwarded up to event {self.cursor}; go on with after={self.cursor}.")


def measured(event: Event) -> dict[str, float]:
    """The numbers of a metric or eval event as a tracker takes them, NaN and infinities included; else nothing."""
    if event.type not in _PREFIX:
        return {}
    found: dict[str, float] = {}
    for name, value in {**event.data, **event.data.get("non_finite", {})}.items():
        if name not in _NO_METRICS and value is not None and not isinstance(value, (bool, dict, list)):
            with contextlib.suppress(ValueError):  # a text that is no number is no metric
                found[f"{_PREFIX[event.type]}/{name}"] = float(value)  # cost too: trackers know nothing but floats
    return found


def settings(job: Job) -> dict[str, Any]:
    """What the job was made with, flat: `hyperparameters.learning_rate`, `adapter.rank`, …"""
    names = ("method", "model", "from_checkpoint", "training_file", "validation_file", "environment_id", "seed")
    nested = {"hyperparameters": job.hyperparameters, "adapter": job.adapter, "resources": job.resources}
    flat = {f"{group}.{name}": value for group, values in nested.items() for name, value in values.items()}
    return {**{name: getattr(job, name) for name in names}, **flat, **_environment(job.environment or {})}


def _environment(spec: Mapping[str, Any]) -> dict[str, Any]:
    """What tells runs apart; a grader by its type, as its source may be longer than a tracker takes."""
    told = {name: value for name, value in spec.items() if name not in ("grader", "system_prompt", "config")}
    config = {f"config.{name}": value for name, value in (spec.get("config") or {}).items()}
    grader = {"grader.type": spec["grader"].get("type")} if isinstance(spec.get("grader"), dict) else {}
    return {f"environment.{name}": value for name, value in {**told, **config, **grader}.items()}


class TensorBoard:
    """An event file in `folder`/<job id>: scalars, hyper-parameters, and how the job ended."""

    def __init__(self, folder: str | Path) -> None:
        self._folder = Path(folder)
        self._writer: Any = None

    def open(self, job: Job, settings: Mapping[str, Any], *, fresh: bool) -> None:
        with _library("tensorboard"):
            from tensorboard.plugins.hparams.summary_v2 import hparams_pb
            from tensorboard.summary.writer.event_file_writer import EventFileWriter
        folder = self._folder / job.id
        if fresh and any(folder.glob("events.out.tfevents.*")):
            raise FineryError(
                f"{folder} holds an event file already, and every metric would be in it twice. Remove it, or pass "
                "`after`, the last event that it has."
            )
        self._writer = EventFileWriter(str(folder))
        if fresh:
            self._add(hparams_pb({name: _plain(value) for name, value in settings.items()}, trial_id=job.id))

    def write(self, values: Mapping[str, float], step: int, time: datetime) -> None:
        from tensorboard.compat.proto.summary_pb2 import Summary

        summary = Summary(value=[Summary.Value(tag=name, simple_value=value) for name, value in values.items()])
        self._add(summary, step=step, wall_time=time.timestamp())

    def close(self, job: Job | None) -> None:
        if self._writer is None:
            return
        if job is not None:
            self._add(_session_end(job))
        self._writer.close()

    def _add(self, summary: Any, *, step: int = 0, wall_time: float | None = None) -> None:
        from tensorboard.compat.proto.event_pb2 import Event as Entry

        self._writer.add_event(Entry(summary=summary, step=step, wall_time=wall_time))


class WandB:
    """A run with the job's id. `options` are those of `wandb.init`: project, entity, mode="offline", dir, …"""

    def __init__(self, **options: Any) -> None:
        self._options = options
        self._run: Any = None

    def open(self, job: Job, settings: Mapping[str, Any], *, fresh: bool) -> None:
        with _library("wandb"):
            import wandb
        named = {"id": job.id, "name": job.name or job.id, "resume": None if fresh else "allow"}
        self._run = wandb.init(**{**named, **self._options}, config=dict(settings))
        # A step of our own: W&B drops what comes under a step below its last, and a job may repeat steps.
        self._run.define_metric("step")
        self._run.define_metric("*", step_metric="step")

    def write(self, values: Mapping[str, float], step: int, time: datetime) -> None:
        self._run.log({**values, "step": step, "time": time.timestamp()})

    def close(self, job: Job | None) -> None:
        if self._run is None:
            return
        if job is not None:
            self._run.summary.update({"state": str(job.state), "reason": job.reason, "best": job.best_checkpoint})
        self._run.finish(exit_code=0 if job is not None and job.state == "succeeded" else 1)


class MLflow:
    """A run of `experiment` on the tracking server `uri` (None: MLFLOW_TRACKING_URI). `run_id`: go on with this run."""

    def __init__(self, uri: str | None = None, *, experiment: str = "finery", run_id: str | None = None) -> None:
        self._uri, self._experiment = uri, experiment
        self.run_id = run_id
        self._client: Any = None

    def open(self, job: Job, settings: Mapping[str, Any], *, fresh: bool) -> None:
        with _library("mlflow"):
            from mlflow.entities import Param
            from mlflow.tracking import MlflowClient
        self._client = MlflowClient(self._uri)
        if self.run_id is not None:
            self._client.update_run(self.run_id, status="RUNNING")
            return
        if not fresh:
            raise FineryError("Expected run_id, the MLflow run to go on with, next to `after`; found none.")
        known = self._client.get_experiment_by_name(self._experiment)
        experiment = known.experiment_id if known else self._client.create_experiment(self._experiment)
        run = self._client.create_run(experiment, run_name=job.name or job.id, tags={"finery.job": job.id})
        self.run_id = run.info.run_id
        params = [Param(name, str(_plain(value))) for name, value in settings.items()]
        self._client.log_batch(self.run_id, params=params)

    def write(self, values: Mapping[str, float], step: int, time: datetime) -> None:
        from mlflow.entities import Metric

        at = int(time.timestamp() * 1000)
        self._client.log_batch(self.run_id, metrics=[Metric(name, value, at, step) for name, value in values.items()])

    def close(self, job: Job | None) -> None:
        if self._client is None or self.run_id is None:
            return
        if job is not None:
            self._client.set_tag(self.run_id, "finery.state", str(job.state))
            self._client.set_tag(self.run_id, "finery.reason", str(job.reason))
        ends = {"succeeded": "FINISHED", "failed": "FAILED"}
        self._client.set_terminated(self.run_id, ends.get(str(job.state), "KILLED") if job else "KILLED")


SINKS: dict[str, Callable[..., Sink]] = {"tensorboard": TensorBoard, "wandb": WandB, "mlflow": MLflow}


@contextlib.contextmanager
def _library(name: str) -> Iterator[None]:
    try:
        yield
    except ImportError as error:
        raise ImportError(f'forwarding to {name} needs its library; run: pip install "finery[{name}]"') from error


def _plain(value: object) -> bool | int | float | str:
    return value if isinstance(value, (bool, int, float, str)) else "" if value is None else str(value)


def _session_end(job: Job) -> Any:
    """How the run ended, for the HParams table (tensorboard.plugins.hparams)."""
    from tensorboard.compat.proto.summary_pb2 import Summary
    from tensorboard.plugins.hparams import api_pb2, metadata, plugin_data_pb2

    status = api_pb2.STATUS_SUCCESS if job.state == "succeeded" else api_pb2.STATUS_FAILURE
    ended = job.finished_at.timestamp() if job.finished_at else None
    info = plugin_data_pb2.SessionEndInfo(status=status, end_time_secs=ended)
    data = metadata.create_summary_metadata(plugin_data_pb2.HParamsPluginData(session_end_info=info))
    value = Summary.Value(tag=metadata.SESSION_END_INFO_TAG, metadata=data, tensor=metadata.NULL_TENSOR)
    return Summary(value=[value])
