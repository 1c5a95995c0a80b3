"""Metrics in trackers, read back with the trackers' own libraries."""

from __future__ import annotations

import struct
from datetime import datetime
from pathlib import Path
from typing import Any

import pytest

from finery import Finery, FineryError
from finery.forward import MLflow, TensorBoard, WandB

from .forwarded import HELD_OUT, LOSSES, running, same
from .support import KEY, NOW, Client, client_of, value


def scalars(folder: Path) -> Any:
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    found = EventAccumulator(str(folder))
    found.Reload()
    return found


@pytest.mark.parametrize(("state", "status"), [("succeeded", "STATUS_SUCCESS"), ("cancelled", "STATUS_FAILURE")])
async def test_tensorboard_reads_back_what_was_written(kind: Client, tmp_path: Path, state: str, status: str) -> None:
    with running(state) as server:
        await value(client_of(kind, server).jobs.forward("job_1", to=TensorBoard(tmp_path)))
    found = scalars(tmp_path / "job_1")
    assert set(found.Tags()["scalars"]) == {
        "train/loss",
        "train/learning_rate",
        "train/cost",
        "validation/loss",
        "validation/tokens",
    }
    assert same([(point.step, point.value) for point in found.Scalars("train/loss")], LOSSES)
    assert same([(point.step, point.value) for point in found.Scalars("validation/loss")], HELD_OUT)
    assert found.Scalars("train/loss")[0].wall_time == datetime.fromisoformat(NOW).timestamp()
    from tensorboard.plugins.hparams import api_pb2, plugin_data_pb2

    parameters = found.PluginTagToContent("hparams")
    start = plugin_data_pb2.HParamsPluginData.FromString(parameters["_hparams_/session_start_info"])
    assert start.session_start_info.hparams["hyperparameters.learning_rate"].number_value == 0.0002
    assert start.session_start_info.hparams["hyperparameters.schedule"].string_value == "cosine"
    end = plugin_data_pb2.HParamsPluginData.FromString(parameters["_hparams_/session_end_info"])
    assert api_pb2.Status.Name(end.session_end_info.status) == status


async def test_a_second_run_into_the_same_folder_is_refused_unless_it_goes_on(kind: Client, tmp_path: Path) -> None:
    with running() as server:
        client = client_of(kind, server)
        await value(client.jobs.forward("job_1", to=TensorBoard(tmp_path)))
        with pytest.raises(FineryError, match="every metric would be in it twice"):
            await value(client.jobs.forward("job_1", to=TensorBoard(tmp_path)))
        await value(client.jobs.forward("job_1", to=TensorBoard(tmp_path), after=7))
    found = scalars(tmp_path / "job_1")
    assert [point.step for point in found.Scalars("train/loss")] == [1, 2, 2]


@pytest.mark.slow  # it makes the tables of a data base first: 3 s alone, 15 s beside others
def test_mlflow_reads_back_what_was_written(tmp_path: Path) -> None:
    from mlflow.tracking import MlflowClient

    uri = f"sqlite:///{tmp_path / 'mlflow.db'}"
    sink = MLflow(uri, experiment="bots")
    with running() as server, Finery(KEY, server.url) as client:
        client.jobs.forward("job_1", to=sink)
        assert sink.run_id is not None
        client.jobs.forward("job_1", to=MLflow(uri, run_id=sink.run_id), after=9)
        with pytest.raises(FineryError, match="Expected run_id"):
            client.jobs.forward("job_1", to=MLflow(uri), after=9)
    found = MlflowClient(uri)
    run = found.get_run(sink.run_id)
    assert (run.info.status, run.info.run_name) == ("FINISHED", "bot")
    assert run.data.params["hyperparameters.learning_rate"] == "0.0002"
    assert (run.data.tags["finery.job"], run.data.tags["finery.state"]) == ("job_1", "succeeded")
    for name, expected in (("train/loss", LOSSES), ("validation/loss", HELD_OUT)):
        history = found.get_metric_history(sink.run_id, name)
        assert sorted(point.step for point in history) == [step for step, _ in expected]
    assert sorted(point.value for point in found.get_metric_history(sink.run_id, "validation/loss")) == [3.0, 3.94]


def wandb_records(path: Path) -> list[Any]:
    """Records of a .wandb file: after a header of 7 bytes a log in LevelDB's format (blocks of 32 KiB; per chunk
    4 bytes of checksum, 2 of length, 1 of kind: whole, first, middle, last)."""
    from wandb.proto import wandb_internal_pb2

    content, at, parts, records = path.read_bytes(), 7, b"", []
    while at + 7 <= len(content):
        if 32768 - at % 32768 < 7:
            at += 32768 - at % 32768
            continue
        length, kind = struct.unpack_from("<HB", content, at + 4)
        parts += content[at + 7 : at + 7 + length]
        at += 7 + length
        if kind in (1, 4):
            records.append(wandb_internal_pb2.Record.FromString(parts))
            parts = b""
    return records


def test_wandb_keeps_offline_what_was_written(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("WANDB_CONFIG_DIR", "WANDB_CACHE_DIR", "WANDB_DATA_DIR"):
        monkeypatch.setenv(name, str(tmp_path / name.lower()))
    monkeypatch.setenv("WANDB_SILENT", "true")
    with running() as server, Finery(KEY, server.url) as client:
        client.jobs.forward("job_1", to=WandB(project="bots", mode="offline", dir=str(tmp_path)))
    (path,) = (path for path in tmp_path.rglob("*.wandb") if not path.parent.is_symlink())
    records = wandb_records(path)
    rows = [
        {item.nested_key[0] if item.nested_key else item.key: item.value_json for item in record.history.item}
        for record in records
        if record.WhichOneof("record_type") == "history"
    ]
    losses = [(int(row["step"]), float(row["train/loss"].strip('"'))) for row in rows if "train/loss" in row]
    assert same(losses, LOSSES)
    assert [(int(r["step"]), float(r["validation/loss"])) for r in rows if "validation/loss" in r] == HELD_OUT
    run = next(record.run for record in records if record.WhichOneof("record_type") == "run")
    assert (run.run_id, run.display_name, run.project) == ("job_1", "bot", "bots")
    assert {item.key: item.value_json for item in run.config.update}["hyperparameters.learning_rate"] == "0.0002"
    summary = {i.key: i.value_json for r in records for i in r.summary.update}
    assert summary["state"] == '"succeeded"'
    assert [record.exit.exit_code for record in records if record.WhichOneof("record_type") == "exit"] == [0]
