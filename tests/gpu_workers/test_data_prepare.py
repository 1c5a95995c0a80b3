"""Preparation as a whole: child process, result, report."""

from __future__ import annotations

import json
import subprocess
import sys
import time
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from finery_gpu_workers import run
from finery_gpu_workers.data import prepared
from finery_gpu_workers.data.packing import Plan
from finery_gpu_workers.data.rendering import Phase
from finery_gpu_workers.data.request import Progress
from finery_gpu_workers.methods import prepare as prepare_module
from finery_gpu_workers.methods.rendering_child import Limits, _watch
from finery_protos.v1 import worker_pb2 as pb
from finery_testing.tiny import CHAT_TEMPLATE, make_tiny_model

from .conftest import MakeJob, as_jsonl, chat_rows, passes

PREPARE = pb.ATTEMPT_KIND_PREPARE
LOOP = "{% for a in range(100000) %}{% for b in range(100000) %}{% endfor %}{% endfor %}"


def with_template(folder: Path, source: str) -> Path:
    make_tiny_model(folder)
    (folder / "chat_template.jinja").write_text(source)
    return folder


@pytest.fixture
def impatient(monkeypatch: pytest.MonkeyPatch) -> None:
    patient = prepare_module.prepare
    monkeypatch.setattr(run, "prepare", lambda work, now: patient(work, now, Limits(row=2.0)))


def test_prepared_data_is_stored_counted_and_quoted(make_job: MakeJob) -> None:
    control = make_job(validation=chat_rows(2), epochs=3)
    run.main(control.attempt(PREPARE))
    report = control.prepared
    assert report is not None
    assert control.finished is None
    data = prepared.load(control.store / report.prepared_prefix)
    assert (report.rows, report.dropped_rows, report.truncated_rows) == (7, 0, 0)
    # "0" to "8" is one digit and its end of turn, "10" and "12" are two
    assert report.trained_tokens == 5 * 2 + 2 * 3
    assert report.tokens == int(data.train.lengths.sum())
    plan = Plan(data.train.lengths, passes(control), 0)
    assert report.total_steps == plan.total_steps
    assert report.total_trained_tokens == 3 * report.trained_tokens
    statistics = json.loads(report.statistics_json)
    assert statistics["sets"]["validation"]["rows"] == 2
    assert statistics["template_sha256"] == data.index["template_sha256"]
    assert data.validation is not None
    assert len(data.validation) == 2


def test_preparing_twice_gives_the_same_bytes(make_job: MakeJob) -> None:
    control = make_job()
    digests = []
    for _ in range(2):
        run.main(control.attempt(PREPARE))
        assert control.prepared is not None
        folder = control.store / control.prepared.prepared_prefix
        digests.append({path.name: prepared.sha256_file(path) for path in folder.iterdir()})
    assert digests[0] == digests[1]


def test_templates_show_the_day_on_which_the_job_was_created(make_job: MakeJob, tmp_path: Path) -> None:
    """And not that of the attempt: one after midnight prepares the same data."""
    source = "{{ strftime_now('%d %B %Y') }}" + CHAT_TEMPLATE
    control = make_job(model=with_template(tmp_path / "m", source))
    control.created_ms = 1_773_532_799_999  # 2026-03-14T23:59:59.999Z
    run.main(control.attempt(PREPARE))
    assert control.prepared is not None
    row = prepared.load(control.store / control.prepared.prepared_prefix).train.row(0)
    assert bytes(row.tokens[:13].tolist()) == b"14 March 2026"


def test_bad_rows_end_the_job_with_their_lines(make_job: MakeJob) -> None:
    rows = chat_rows(2)
    bad = as_jsonl([rows[0]]) + b"\n" + b'{"messages": []}\n' + as_jsonl([rows[1]]) + b"[]\n"
    control = make_job(bad)
    run.main(control.attempt(PREPARE))
    assert control.finished is not None
    error = control.finished.error
    assert control.finished.reason == "invalid_data"
    assert error is not None
    assert (error.code, error.param) == ("last_message_not_assistant", "training_file")
    assert error.message.startswith("2 of the file's lines cannot be used; line 3, messages: expected the last message")
    assert [(d["line"], d["code"]) for d in error.details or []] == [
        (3, "last_message_not_assistant"),
        (5, "not_an_object"),
    ]


def test_many_bad_rows_fit_into_the_error(make_job: MakeJob) -> None:
    control = make_job(b'{"messages": [{"role": "human", "content": ""}]}\n' * 300)
    run.main(control.attempt(PREPARE))
    assert control.finished is not None
    assert control.finished.error is not None
    assert control.finished.error.message.startswith("300 of the file's lines")
    assert 20 < len(control.finished.error.details or []) <= 100


def test_a31_rows_that_the_template_refuses_are_listed_before_training(make_job: MakeJob, tmp_path: Path) -> None:
    refuse = "{% if messages[0].role == 'system' %}{{ raise_exception('no system role here') }}{% endif %}"
    rows = chat_rows(3)
    rows[1]["messages"].insert(0, {"role": "system", "content": "x"})
    control = make_job(rows, model=with_template(tmp_path / "m", refuse + CHAT_TEMPLATE))
    run.main(control.attempt(PREPARE))
    assert control.finished is not None
    assert control.finished.error is not None
    assert control.finished.error.code == "template_error"
    assert control.finished.error.details is not None
    assert control.finished.error.details[0]["line"] == 2
    assert "no system role here" in control.finished.error.details[0]["message"]


def test_a13_rows_without_a_sure_mask_are_rejected(make_job: MakeJob, tmp_path: Path) -> None:
    source = CHAT_TEMPLATE.replace("assistant\\n' }}{%- endif", "assistant\\nSure' }}{%- endif")
    control = make_job(model=with_template(tmp_path / "m", source))
    run.main(control.attempt(PREPARE))
    assert control.finished is not None
    assert control.finished.error is not None
    assert control.finished.error.code == "prompt_not_prefix"
    assert len(control.finished.error.details or []) == 7


def test_a18_all_rows_cut_away_ends_the_job_before_training(make_job: MakeJob) -> None:
    control = make_job(max_length=20)
    run.main(control.attempt(PREPARE))
    assert control.finished is not None
    assert control.finished.reason == "no_trainable_tokens"
    assert control.finished.error is not None
    assert control.finished.error.code == "no_trainable_tokens"
    assert control.finished.error.details == [{"dropped_rows": 7, "lines": [1, 2, 3, 4, 5, 6, 7]}]


def test_h12_a_template_that_loops_is_killed(make_job: MakeJob, tmp_path: Path, impatient: None) -> None:
    control = make_job(model=with_template(tmp_path / "m", LOOP + CHAT_TEMPLATE))
    run.main(control.attempt(PREPARE))
    assert control.finished is not None
    error = control.finished.error
    assert control.finished.reason == "invalid_data"
    assert error is not None
    assert (error.code, error.details) == ("invalid_chat_template", [{"line": 1}])


@pytest.mark.parametrize(
    "source",
    [
        "{{ 10 ** (10 ** 10) }}",  # loops inside one C call, where no signal is seen
        "{{ 'x' * (10 ** 11) }}",  # 100 GB
        "{{ ''.__class__.__mro__ }}",
        "x" * 5_000_000,
    ],
)
def test_h12_bad_templates_end_the_job(make_job: MakeJob, tmp_path: Path, impatient: None, source: str) -> None:
    control = make_job(model=with_template(tmp_path / "m", source))
    run.main(control.attempt(PREPARE))
    assert control.finished is not None
    assert control.finished.reason == "invalid_data"
    assert control.finished.error is not None
    assert control.finished.error.code == "invalid_chat_template"


@pytest.mark.slow
def test_rendering_that_is_slow_but_moves_is_not_blamed_on_a_row(
    make_job: MakeJob, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    patient = prepare_module.prepare
    limits = Limits(total=4.0, bytes_per_second=1e9)
    monkeypatch.setattr(run, "prepare", lambda work, now: patient(work, now, limits))
    slow = "{% for a in range(1000) %}{% for b in range(1000) %}{% endfor %}{% endfor %}"
    control = make_job(chat_rows(200), model=with_template(tmp_path / "m", slow + CHAT_TEMPLATE))
    run.main(control.attempt(PREPARE))
    assert control.finished is not None
    assert control.finished.reason == "platform_fault"
    assert "did not end in 4 s; it is at (<Phase." in caplog.text


@pytest.mark.parametrize(("phase", "is_killed"), [(Phase.TEMPLATE, True), (Phase.TOKENIZER, False)])
def test_only_a_template_can_be_stuck_in_a_row(tmp_path: Path, phase: Phase, is_killed: bool) -> None:
    """A long line without a blank is tokenised for a minute."""
    work: Any = SimpleNamespace(control=SimpleNamespace(intent=None))
    progress = Progress(tmp_path / "progress", create=True)
    progress.set(0, phase, 3)
    child = subprocess.Popen([sys.executable, "-c", "import time; time.sleep(1.5)"])
    try:
        ending = _watch(work, child, progress, Limits(row=0.3, start=60.0), 0, ["training_file"])
    finally:
        child.kill()
        child.wait()
    assert (ending is not None) == is_killed


@pytest.mark.slow
def test_a_row_of_many_turns_that_moves_is_not_taken_for_stuck(
    make_job: MakeJob, tmp_path: Path, impatient: None
) -> None:
    """Each turn is a text of its own; all of them take longer than one may."""
    slow = "{% for a in range(1000) %}{% for b in range(1000) %}{% endfor %}{% endfor %}"
    (row,) = chat_rows(1)
    control = make_job([{"messages": row["messages"] * 80}], model=with_template(tmp_path / "m", slow + CHAT_TEMPLATE))
    started = time.monotonic()
    run.main(control.attempt(PREPARE))
    assert control.prepared is not None, control.finished
    assert time.monotonic() - started > 3.0


def test_a_cancel_kills_the_child(make_job: MakeJob, tmp_path: Path) -> None:
    control = make_job(model=with_template(tmp_path / "m", LOOP + CHAT_TEMPLATE))
    control.lease_seconds = 3.0  # heartbeats every second bring the orders

    def cancel(name: str, _request: Any) -> None:
        if name == "Heartbeat":
            control.intent = pb.INTENT_CANCEL

    control.hook = cancel
    run.main(control.attempt(PREPARE))
    assert control.finished is not None
    assert control.finished.reason == "cancelled_by_customer"


def test_the_child_holds_no_credential(make_job: MakeJob, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("FINERY_ATTEMPT_TOKEN", "secret")
    monkeypatch.setenv("AWS_SECRET_ACCESS_KEY", "secret")
    seen: list[dict[str, str]] = []
    popen = subprocess.Popen

    def spy(*args: Any, **options: Any) -> Any:
        seen.append(options["env"])
        return popen(*args, **options)

    monkeypatch.setattr(subprocess, "Popen", spy)
    run.main(make_job().attempt(PREPARE))
    (environment,) = seen
    assert environment.keys() <= {
        "PATH", "PYTHONPATH", "LD_LIBRARY_PATH", "LANG", "MALLOC_ARENA_MAX", "RAYON_NUM_THREADS",
    }  # fmt: skip


def test_tokens_that_the_model_has_no_embedding_for_end_the_job_before_training(
    make_job: MakeJob, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """A tokenizer that was extended, weights that were not: <|im_end|> is 260."""
    control = make_job(model=make_tiny_model(tmp_path / "m", vocab_size=260))
    run.main(control.attempt(PREPARE))
    assert control.prepared is None
    assert control.finished is not None
    assert control.finished.reason == "platform_fault"
    assert (
        "m: expected token ids below 260, the rows of the embedding matrix, found 260 in the train data" in caplog.text
    )


def test_a_file_that_is_not_the_uploaded_one_is_a_fault(make_job: MakeJob) -> None:
    control = make_job()
    (control.store / "ten_test/files/training").write_bytes(b"other")
    run.main(control.attempt(PREPARE))
    assert control.finished is not None
    assert control.finished.reason == "platform_fault"


def test_the_child_loads_neither_torch_nor_grpc() -> None:
    code = (
        "import sys, finery_gpu_workers.data.render; print(sorted({'torch', 'grpc', 'obstore'} & sys.modules.keys()))"
    )
    found = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert found.stdout.strip() == "[]"
