"""How a worker begins, and what its exceptions mean for the job."""

from __future__ import annotations

import json
import logging
import os
import shutil
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import grpc
import pytest
import torch

from finery_gpu_workers import run
from finery_gpu_workers.errors import WorkerError
from finery_gpu_workers.methods import passes_run
from finery_gpu_workers.resume import Cursor
from finery_gpu_workers.run import Settings
from finery_gpu_workers.scratch import scratch_folder
from finery_protos.v1 import worker_pb2 as pb
from finery_testing.tiny import make_tiny_model

from .conftest import MakeJob

PREPARE, TRAIN = pb.ATTEMPT_KIND_PREPARE, pb.ATTEMPT_KIND_TRAIN
SECRET = f"/root/secret-{'x' * 8}"


def cpu_allocation_failure() -> Exception:
    """As torch raises it."""
    with pytest.raises(RuntimeError) as error:
        torch.empty(2**55)
    return error.value


@pytest.mark.parametrize(
    ("error", "reason", "code"),
    [
        (RuntimeError(SECRET), "platform_fault", "platform_fault"),
        (WorkerError("invalid_model", SECRET), "platform_fault", "platform_fault"),
        (WorkerError("invalid_chat_template", "it loops"), "invalid_data", "invalid_chat_template"),
        (WorkerError("unsupported_model", "another"), "invalid_model", "unsupported_model"),
        (WorkerError("added_tokens_untrained", "add"), "invalid_model", "added_tokens_untrained"),
        (WorkerError("invalid_environment", "mend it"), "invalid_environment", "invalid_environment"),
        (WorkerError("sandbox_unavailable", "no namespaces"), "sandbox_unavailable", "sandbox_unavailable"),
        (WorkerError("rewards_failed", "all of them"), "rewards_failed", "rewards_failed"),
        (MemoryError(SECRET), "out_of_memory", "out_of_memory"),
        (torch.OutOfMemoryError(SECRET), "out_of_memory", "out_of_memory"),
        (cpu_allocation_failure(), "out_of_memory", "out_of_memory"),
    ],
)
def test_exceptions_become_reasons_and_the_customer_sees_no_internals(
    make_job: MakeJob, monkeypatch: pytest.MonkeyPatch, error: Exception, reason: str, code: str
) -> None:
    control = make_job()
    run.main(control.attempt(PREPARE))

    def fail(*_: Any) -> None:
        raise error

    monkeypatch.setattr(passes_run.Run, "update", fail)
    run.main(control.attempt(TRAIN))
    assert control.finished is not None
    assert control.finished.error is not None
    assert (control.finished.reason, control.finished.error.code) == (reason, code)
    assert SECRET not in control.finished.error.model_dump_json()
    if reason == "platform_fault":
        assert "att_2" in control.finished.error.message


def _no_folder(folder: Path) -> None:
    shutil.rmtree(folder)


def _no_weights(folder: Path) -> None:
    (folder / "model.safetensors").unlink()


def _pickle(folder: Path) -> None:
    (folder / "pytorch_model.bin").write_bytes(b"")


@pytest.mark.parametrize("kind", [PREPARE, TRAIN])
@pytest.mark.parametrize("damage", [_no_folder, _no_weights, _pickle])
def test_a_broken_model_of_the_catalogue_ends_the_job_at_once_and_only_the_log_says_where_it_is(
    make_job: MakeJob,
    tmp_path: Path,
    caplog: pytest.LogCaptureFixture,
    damage: Callable[[Path], None],
    kind: pb.AttemptKind.ValueType,
) -> None:
    model = make_tiny_model(tmp_path / "somewhere-secret")
    control = make_job(model=model)
    if kind == TRAIN:
        run.main(control.attempt(PREPARE))
    damage(model)
    run.main(control.attempt(kind))
    assert control.finished is not None
    error = control.finished.error
    assert error is not None
    assert (control.finished.reason, error.code, error.param) == ("invalid_model", "model_not_found", "model")
    assert "ask the operator" in error.message
    assert "somewhere-secret" not in error.model_dump_json()
    assert "somewhere-secret" in caplog.text


def test_a_checkpoint_on_its_way_still_counts_when_the_loop_fails(
    make_job: MakeJob, monkeypatch: pytest.MonkeyPatch
) -> None:
    control = make_job(epochs=3, checkpoint_every=2)
    run.main(control.attempt(PREPARE))
    control.hook = lambda name, _request: time.sleep(0.5) if name == "PublishCheckpoint" else None
    update = passes_run.Run.update

    def fail(self: passes_run.Run, step: int, before: Cursor) -> passes_run.Result:
        if step == 3:
            raise RuntimeError("in the step behind the checkpoint")
        return update(self, step, before)

    monkeypatch.setattr(passes_run.Run, "update", fail)
    run.main(control.attempt(TRAIN))
    assert control.finished is not None
    assert control.finished.reason == "platform_fault"
    assert [c.step for c in control.checkpoints] == [2]


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


def test_a_preparation_goes_on_under_a_pause(make_job: MakeJob) -> None:
    control = make_job()
    control.intent = pb.INTENT_PAUSE
    run.main(control.attempt(PREPARE))
    assert control.prepared is not None
    assert control.finished is None


def test_a_preview_is_looked_at_and_nothing_is_prepared(make_job: MakeJob) -> None:
    control = make_job([{"messages": [{"role": "user", "content": "hi"}, {"role": "assistant", "content": "ok"}]}])
    control.preview_json = '{"model": "tiny"}'
    run.main(control.attempt(PREPARE))
    assert control.previewed is not None
    (row,) = json.loads(control.previewed.rows_json)
    trained = [place for place, token in enumerate(row["tokens"]) if token["trained"]]
    assert (len(row["tokens"]), trained) == (25, [21, 22, 23])
    assert (control.prepared, control.finished) == (None, None)
    assert not list(control.store.rglob("prepared"))


def test_missing_settings_are_named() -> None:
    with pytest.raises(SystemExit, match="FINERY_RPC_ADDRESS, FINERY_ATTEMPT_ID"):
        Settings.read({"FINERY_FENCE": "1"})


def test_torch_is_loaded_only_to_train() -> None:
    """Loading it takes seconds: the first call comes before, and a preparation never pays for it."""
    code = "import finery_gpu_workers.run, sys; sys.exit('torch' in sys.modules or 'transformers' in sys.modules)"
    subprocess.run([sys.executable, "-c", code], check=True)


def test_settings_do_not_show_the_token(make_job: MakeJob) -> None:
    environment = make_job().attempt(TRAIN) | {"FINERY_DEVICE": "auto"}
    settings = Settings.read(environment)
    assert "token-1" not in repr(settings)
    assert settings.device == "auto"
    assert (settings.fence, settings.torch_threads) == (1, 1)


def test_what_score_models_are_allowed_is_read_and_not_shown(make_job: MakeJob) -> None:
    environment = make_job().attempt(TRAIN)
    assert Settings.read(environment).score_models == {}
    given = environment | {"FINERY_SCORE_MODELS": json.dumps({"http://a/v1": SECRET, "http://b/v1": None})}
    settings = Settings.read(given)
    assert settings.score_models == {"http://a/v1": SECRET, "http://b/v1": None}
    assert SECRET not in repr(settings)
    for broken in ("[]", "{", json.dumps({SECRET: 1})):
        with pytest.raises(SystemExit, match="expected a JSON object") as error:
            Settings.read(environment | {"FINERY_SCORE_MODELS": broken})
        assert SECRET not in str(error.value)


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
    (root,) = scratch.iterdir()
    assert not list(root.iterdir())


def test_what_a_killed_worker_left_on_the_disk_is_removed_by_the_next_one(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("tempfile.tempdir", str(tmp_path))
    hold = (
        "import sys, time; from finery_gpu_workers.scratch import scratch_folder\n"
        "with scratch_folder() as f: (f / 'x').touch(); print(f, flush=True); time.sleep(60)"
    )
    command, environment = [sys.executable, "-c", hold], os.environ | {"TMPDIR": str(tmp_path)}
    killed, alive = (subprocess.Popen(command, env=environment, stdout=subprocess.PIPE, text=True) for _ in range(2))
    try:
        folders = [Path(process.stdout.readline().strip()) for process in (killed, alive) if process.stdout]
        killed.kill()
        killed.wait()
        assert all((folder / "x").exists() for folder in folders)
        with scratch_folder() as mine:
            assert set(mine.parent.iterdir()) == {mine, folders[1]}
            assert mine.parent.stat().st_mode & 0o777 == 0o700
            assert (folders[1] / "x").exists()
        assert not mine.exists()
    finally:
        for process in (killed, alive):
            process.kill()
            process.communicate()
