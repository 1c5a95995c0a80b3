"""How a worker begins, and what its exceptions mean for the job."""

from __future__ import annotations

import logging
from pathlib import Path
from typing import Any

import grpc
import pytest
import torch

from finery_gpu_workers import run
from finery_gpu_workers.errors import WorkerError
from finery_gpu_workers.methods import sft
from finery_gpu_workers.run import Settings
from finery_protos.v1 import worker_pb2 as pb

from .conftest import MakeJob

PREPARE, TRAIN = pb.ATTEMPT_KIND_PREPARE, pb.ATTEMPT_KIND_TRAIN
SECRET = f"/root/secret-{'x' * 8}"


@pytest.mark.parametrize(
    ("error", "reason", "code"),
    [
        (RuntimeError(SECRET), "platform_fault", "platform_fault"),
        (WorkerError("invalid_model", SECRET), "platform_fault", "platform_fault"),
        (WorkerError("invalid_chat_template", "it loops"), "invalid_data", "invalid_chat_template"),
        (MemoryError(SECRET), "out_of_memory", "out_of_memory"),
        (torch.OutOfMemoryError(SECRET), "out_of_memory", "out_of_memory"),
    ],
)
def test_exceptions_become_reasons_and_the_customer_sees_no_internals(
    make_job: MakeJob, monkeypatch: pytest.MonkeyPatch, error: Exception, reason: str, code: str
) -> None:
    control = make_job()
    run.main(control.attempt(PREPARE))

    def fail(*_: Any) -> None:
        raise error

    monkeypatch.setattr(sft.Run, "update", fail)
    run.main(control.attempt(TRAIN))
    assert control.finished is not None
    assert control.finished.error is not None
    assert (control.finished.reason, control.finished.error.code) == (reason, code)
    assert SECRET not in control.finished.error.model_dump_json()
    if reason == "platform_fault":
        assert "att_2" in control.finished.error.message


def test_a_fault_is_in_the_log_with_its_traceback_and_no_token(
    make_job: MakeJob, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    control = make_job()

    def fail(*_: Any) -> None:
        raise RuntimeError("the reason")

    monkeypatch.setattr(run, "prepare", fail)
    with caplog.at_level(logging.INFO):
        run.main(control.attempt(PREPARE))
    assert "the reason" in caplog.text
    assert "Traceback" in caplog.text
    assert "token-1" not in caplog.text


def test_a_fenced_worker_returns_and_says_nothing_more(make_job: MakeJob) -> None:
    control = make_job(epochs=3)
    run.main(control.attempt(PREPARE))
    after: list[str] = []

    def fence(name: str, request: Any) -> grpc.StatusCode | None:
        if after or (name == "CommitSteps" and request.steps[-1].step >= 2):
            after.append(name)
            return grpc.StatusCode.ABORTED
        return None

    control.hook = fence
    run.main(control.attempt(TRAIN))
    assert after == ["CommitSteps"]
    assert control.finished is None


def test_a_refused_call_is_a_fault(make_job: MakeJob) -> None:
    control = make_job()
    run.main(control.attempt(PREPARE))
    control.hook = lambda name, _request: grpc.StatusCode.INVALID_ARGUMENT if name == "CommitSteps" else None
    run.main(control.attempt(TRAIN))
    assert control.finished is not None
    assert control.finished.reason == "platform_fault"


def test_missing_settings_are_named() -> None:
    with pytest.raises(SystemExit, match="FINERY_RPC_ADDRESS, FINERY_ATTEMPT_ID"):
        Settings.read({"FINERY_FENCE": "1"})


def test_settings_do_not_show_the_token(make_job: MakeJob) -> None:
    environment = make_job().attempt(TRAIN) | {"FINERY_DEVICE": "auto"}
    settings = Settings.read(environment)
    assert "token-1" not in repr(settings)
    assert settings.device == ("cuda" if torch.cuda.is_available() else "cpu")
    assert (settings.fence, settings.torch_threads) == (1, 1)


def test_nothing_is_left_on_the_workers_disk(
    make_job: MakeJob, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    scratch = tmp_path / "scratch"
    scratch.mkdir()
    monkeypatch.setattr("tempfile.tempdir", str(scratch))
    control = make_job(checkpoint_every=1)
    run.main(control.attempt(PREPARE))
    run.main(control.attempt(TRAIN))
    assert control.finished is not None
    assert control.finished.reason == "completed"
    assert not list(scratch.iterdir())
