"""What the command shows of data, checkpoints and previews, and what it changes."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from finery.forward import TensorBoard

from .cli_api import Api
from .support import checkpoint_json, error_json, event_json, job_json, page_json

SET = {
    "format": "chat",
    "rows": 95,
    "tokens": 12_345,
    "trained_tokens": 2_469,
    "dropped_rows": 5,
    "dropped": {"no_trainable_tokens": 3, "too_long": 2},
    "dropped_lines": [4, 9, 12, 40, 41],
    "truncated_rows": 1,
    "truncated_lines": [7],
    "longest": 300,
    "shortest": 12,
    "lengths": [{"up_to": 16, "rows": 1}, {"up_to": 256, "rows": 60}, {"up_to": 512, "rows": 39}],
    "digest": "00",
}
WARNING: dict[str, Any] = {
    "code": "reasoning_not_trained",
    "message": "Reasoning of earlier turns is stripped.",
    "param": "hyperparameters.train_on",
    "details": [{"line": 3, "turns": 2}],
}
DATA = {"sets": {"train": SET}, "warnings": [WARNING], "tokenizer_sha256": "00", "vocab_size": 261}


def words(text: str) -> list[str]:
    return [" ".join(line.split()) for line in text.splitlines()]


def test_a_job_shows_what_was_found_in_its_data_and_warns(api: Api, finery: Any) -> None:
    api.answers = {"GET /v1/jobs/job_1": (200, job_json(data=DATA, best_checkpoint="ckpt_7"))}
    result = finery("jobs", "get", "job_1")
    assert result.code == 0, result.err
    shown = words(result.out)
    for line in (
        "best ckpt_7",
        "train data chat, 95 of 100 rows used",
        "tokens 12,345, 2,469 (20.0%) trained in one pass",
        "dropped 3 no trainable tokens, 2 too long: lines 4, 9, 12, 40, 41",
        "truncated 1: line 7",
        "lengths 12 to 300 tokens",
        "≤ 256 60 ██████████████████████████████",
    ):
        assert line in shown
    assert words(result.err)[:2] == [
        "Warning: Reasoning of earlier turns is stripped. (hyperparameters.train_on)",
        "line 3 turns 2",
    ]
    assert "{" not in result.out + result.err


def test_clean_data_says_nothing_of_drops(api: Api, finery: Any) -> None:
    clean = {**SET, "rows": 100, "dropped_rows": 0, "dropped": {}, "dropped_lines": [], "truncated_rows": 0}
    api.answers = {"GET /v1/jobs/job_1": (200, job_json(data={**DATA, "sets": {"train": clean}, "warnings": []}))}
    result = finery("jobs", "get", "job_1")
    assert "train data chat, 100 rows used" in words(result.out)
    assert "dropped" not in result.out
    assert "truncated" not in result.out
    assert result.err == ""


def test_a_failed_job_shows_the_lines_that_failed_it(api: Api, finery: Any) -> None:
    line = {"line": 3, "path": "input_ids[2]", "code": "token_out_of_range", "message": "expected ids below 261"}
    error = {"message": "1 line cannot be used.", "type": "job_error", "code": "token_out_of_range", "details": [line]}
    api.answers = {"GET /v1/jobs/job_1": (200, job_json(state="failed", error=error))}
    result = finery("jobs", "get", "job_1")
    assert (result.code, words(result.err)) == (0, ["line 3 input_ids[2]: expected ids below 261."])


def test_events_are_lines_for_people_and_hold_no_dicts(api: Api, finery: Any) -> None:
    history = [
        event_json(1, "prepared", rows=95, trained_tokens=2469, dropped_rows=5, total_steps=9, statistics=DATA),
        event_json(2, "warning", **WARNING),
        event_json(3, "attempt", attempt="att_1", number=1, phase="started"),
        event_json(4, "eval", step=0, loss=3.94, tokens=50),
        event_json(5, "checkpoint", checkpoint="ckpt_1", step=9, final=True, validation_loss=3.5),
        event_json(6, "telepathy", thought="x", nested={"a": 1}, many=[1]),
    ]
    api.answers = {"GET /v1/jobs/job_1/events": (200, page_json(history))}
    lines = finery("jobs", "events", "job_1").out.splitlines()
    assert [line[40:] for line in lines] == [
        "rows 95  trained_tokens 2469  dropped_rows 5  total_steps 9",
        "Reasoning of earlier turns is stripped.",
        "1 started  attempt att_1",
        "before training  held-out loss 3.94",
        "step 9  ckpt_1  final  held-out loss 3.5",
        "thought x",
    ]


def test_the_best_checkpoint_is_marked_and_downloaded_by_that_name(api: Api, finery: Any, tmp_path: Path) -> None:
    files = {"adapter_config.json": b"{}"}
    best = checkpoint_json(files, id="ckpt_1", best=True, final=False, step=6, validation_loss=3.25)
    last = checkpoint_json({}, id="ckpt_9", step=9, validation_loss=3.5, kind="full")
    api.answers = {
        "GET /v1/checkpoints": (200, page_json([best, last])),
        "GET /v1/checkpoints/ckpt_1": (200, best),
        "GET /v1/jobs/job_1": (200, job_json(best_checkpoint="ckpt_1")),
    }
    rows = words(finery("checkpoints", "list", "--job", "job_1").out)
    assert rows[1].startswith("ckpt_1 job_1 6 ★ best loss 3.25 adapter")
    assert rows[2].startswith("ckpt_9 job_1 9 final loss 3.5 full")
    result = finery("checkpoints", "download", "job_1", "--best", "--to", str(tmp_path / "out"))
    assert result.code == 0, result.err
    assert (tmp_path / "out" / "adapter_config.json").read_bytes() == b"{}"
    assert finery("checkpoints", "download", "ckpt_1", "--best").code == 2


def test_what_is_deleted_is_named_and_what_is_in_use_is_kept(api: Api, finery: Any) -> None:
    for noun, id_ in (("files", "file_1"), ("checkpoints", "ckpt_1")):
        result = finery(noun, "delete", id_)
        assert (result.code, result.err) == (0, f"{id_} deleted\n")
    api.answers = {"DELETE /v1/files/file_2": (409, error_json("file_in_use", "Job job_1 trains on it."))}
    result = finery("files", "delete", "file_1", "file_2")
    assert result.code == 1
    assert result.err.splitlines()[:2] == ["file_1 deleted", "Error: Job job_1 trains on it."]


def test_jobs_are_listed_by_state_and_time(api: Api, finery: Any) -> None:
    options = ["--state", "running", "--state", "queued", "--method", "sft", "--created-after", "2026-11-01"]
    assert finery("jobs", "list", *options).code == 0
    query = "state=running&state=queued&method=sft&created_after=2026-11-01T00%3A00%3A00Z&limit=20"
    assert api.sent(f"GET /v1/jobs?{query}")
    assert finery("jobs", "list", "--created-before", "2026-11-01T01:30:00").code == 2


@pytest.mark.parametrize(("verb", "state"), [("pause", "running, to be paused"), ("resume", "queued")])
def test_a_job_is_paused_and_resumed(api: Api, finery: Any, verb: str, state: str) -> None:
    result = finery("jobs", verb, "job_1")
    assert f"state {state}" in words(result.out)


def test_a_preview_is_printed_or_written_as_a_page(api: Api, finery: Any, tmp_path: Path) -> None:
    options = ["--model", "m", "--train-on", "last", "--rows", "1", "--first-line", "3", "--added-token", "<t>"]
    result = finery("files", "preview", "file_1", *options)
    assert result.out.splitlines()[-2:] == ["line 3: 1 tokens, 1 trained", "⟦<ok>␛[31m⟧"]
    sent = json.loads(api.sent("POST /v1/files/file_1/previews").body)
    assert sent == {"model": "m", "train_on": "last", "rows": 1, "first_line": 3, "added_tokens": ["<t>"]}
    page = tmp_path / "page.html"
    result = finery("files", "preview", "file_1", "--model", "m", "--html", str(page))
    assert (result.code, result.out) == (0, "")
    assert '<mark title="1">&lt;ok&gt;␛[31m</mark>' in page.read_text(encoding="utf-8")


def test_an_upload_names_its_project(api: Api, finery: Any, tmp_path: Path) -> None:
    (tmp_path / "rows.jsonl").write_text("{}\n")
    assert finery("files", "upload", str(tmp_path / "rows.jsonl"), "--project", "proj_2").code == 0
    assert b'name="project"\r\n\r\nproj_2\r\n' in api.sent("POST /v1/files").body


def test_jobs_are_drawn_into_a_file(api: Api, finery: Any, tmp_path: Path) -> None:
    target = tmp_path / "loss.svg"
    result = finery("jobs", "plot", "job_1", "--to", str(target))
    assert (result.code, result.out) == (0, f"{target}\n")
    assert "held-out" not in target.read_text(encoding="utf-8"), "it has no validation file"
    assert finery("jobs", "plot", "job_1", "--to", str(tmp_path / "loss.pdf")).code == 2


def test_a_forwarding_that_is_interrupted_says_where_to_go_on(
    api: Api, finery: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def interrupted(*arguments: Any) -> None:
        raise KeyboardInterrupt

    monkeypatch.setattr(TensorBoard, "write", interrupted)
    result = finery("jobs", "forward", "job_1", "--to", "tensorboard", "--dir", str(tmp_path))
    assert (result.code, result.err) == (130, "Forwarded up to event 2; go on with after=2.\n")


def test_a_trackers_own_error_is_one_line_and_says_where_to_go_on(
    api: Api, finery: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def full(*arguments: Any) -> None:
        raise OSError("No space left on device")

    monkeypatch.setattr(TensorBoard, "write", full)
    result = finery("jobs", "forward", "job_1", "--to", "tensorboard", "--dir", str(tmp_path))
    assert result.code == 1
    assert result.err.startswith("Error: tensorboard: No space left on device\n")
    assert "after=" in result.err


def test_a_job_is_forwarded_to_tensorboard_once(api: Api, finery: Any, tmp_path: Path) -> None:
    options = ["--to", "tensorboard", "--dir", str(tmp_path)]
    result = finery("jobs", "forward", "job_1", *options)
    assert result.code == 0, result.err
    assert len(list((tmp_path / "job_1").glob("events.out.tfevents.*"))) == 1
    again = finery("jobs", "forward", "job_1", *options)
    assert again.code == 1
    assert "every metric would be in it twice" in again.err
    unknown = finery("jobs", "forward", "job_1", "--to", "paper")
    assert unknown.code == 2
    assert "expected --to tensorboard, wandb, mlflow, found 'paper'" in " ".join(unknown.err.replace("│", "").split())
