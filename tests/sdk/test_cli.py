from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from .cli_api import Api
from .support import KEY, error_json, file_json, job_json, page_json


@pytest.mark.parametrize(
    "command",
    [
        "files list",
        "files get file_1",
        "jobs list",
        "jobs get job_1",
        "jobs cancel job_1",
        "jobs pause job_1",
        "jobs resume job_1",
        "files preview file_1 --model m",
        "jobs watch job_1",
        "jobs create --method sft",
        "jobs create --method sft --wait",
        "checkpoints list --job job_1",
        "models list",
        "usage --job job_1 --group-by sku",
    ],
)
def test_json_is_one_document_and_nothing_else(api: Api, finery: Any, command: str) -> None:
    result = finery(*command.split(), "--json")
    assert result.code == 0, result.err
    assert json.loads(result.out)
    plain = finery(*command.split())
    assert (plain.code, plain.out.count("{")) == (0, 0)
    assert plain.out.strip()


def test_events_as_json_are_one_a_line(api: Api, finery: Any) -> None:
    for follow in ((), ("--follow",)):
        lines = finery("jobs", "events", "job_1", "--json", *follow).out.splitlines()
        assert [json.loads(line)["seq"] for line in lines] == [1, 2, 3, 4, 5, 6]
    assert "step 1/2  loss 3.94" in finery("jobs", "events", "job_1").out


def test_create_turns_options_into_the_fields_of_the_job(api: Api, finery: Any, tmp_path: Path) -> None:
    given = tmp_path / "job.json"
    given.write_text(json.dumps({"method": "dpo", "seed": 1, "hyperparameters": {"epochs": 2, "learning_rate": 1}}))
    sets = ["learning_rate=3e-4", "schedule=cosine", "max_grad_norm=null", "nonsense=[1]", "adapter.rank=8", "x=NaN"]
    options = ["--method", "sft", "--model", "smollm2", "--file", "file_1", "--name", "bot", "--seed", "7"]
    result = finery("jobs", "create", "--spec", str(given), *options, *(f"--set={text}" for text in sets))
    assert result.code == 0, result.err
    assert json.loads(api.sent("POST /v1/jobs").body) == {
        "method": "sft",
        "model": "smollm2",
        "training_file": "file_1",
        "name": "bot",
        "seed": 7,
        "adapter": {"rank": 8},
        "hyperparameters": {
            "epochs": 2,
            "learning_rate": 3e-4,
            "schedule": "cosine",
            "max_grad_norm": None,
            "nonsense": [1],
            "x": "NaN",
        },
    }


def test_create_uploads_a_path_and_waits_for_the_end(api: Api, finery: Any, tmp_path: Path) -> None:
    (tmp_path / "rows.jsonl").write_text("{}\n")
    result = finery("jobs", "create", "--method", "sft", "--file", str(tmp_path / "rows.jsonl"), "--wait")
    assert result.code == 0, result.err
    assert json.loads(api.sent("POST /v1/jobs").body)["training_file"] == "file_1"
    for news in (
        "queued: All accelerators are in use.",
        "step 2/2  loss 3.480  99 tok/s  ETA 0:00  $0.000024",
        "ckpt_1",
    ):
        assert news in result.err


def test_a_file_with_wrong_rows_is_shown_and_no_job_is_made(api: Api, finery: Any, tmp_path: Path) -> None:
    fault = {"line": 3, "path": "messages[0].role", "code": "x", "message": "Expected a role.", "hint": "Add one."}
    api.upload = file_json(status="invalid", errors=[fault], error_count=1)
    path = tmp_path / "rows.jsonl"
    path.write_text("{}\n")
    for command in (("files", "upload", str(path)), ("jobs", "create", "--file", str(path))):
        result = finery(*command)
        assert result.code == 1
        assert "line 3 messages[0].role: Expected a role. Add one." in result.err
    assert api.server is not None
    assert not api.server.to("/v1/jobs")


@pytest.mark.parametrize("command", ["jobs watch job_1", "jobs create --wait", "jobs watch job_1 --json"])
def test_a_job_that_fails_ends_the_command_with_1_and_its_reason(api: Api, finery: Any, command: str) -> None:
    error = {"message": "Loss became NaN.", "type": "x", "code": "non_finite_loss", "details": [{"message": "step 7"}]}
    failed = job_json(state="failed", error=error)
    api.answers = {"GET /v1/jobs/job_1": (200, failed), "POST /v1/jobs": (200, failed)}
    result = finery(*command.split())
    assert result.code == 1
    assert "Error: Job job_1 ended failed (non_finite_loss): Loss became NaN." in result.err
    assert "step 7" in result.err
    assert "Hint: finery jobs events job_1" in result.err


def test_an_error_is_one_line_its_details_the_request_and_a_hint(api: Api, finery: Any) -> None:
    details = [{"param": "hyperparameters.nonsense", "message": "Unknown field."}]
    body = error_json("invalid_request", "[bold]2 fields[/bold] are wrong.", param="hyperparameters", details=details)
    api.answers = {"POST /v1/jobs": (400, body), "GET /v1/jobs/job_1": (401, error_json("invalid_key", "No such key."))}
    result = finery("jobs", "create", "--set", "nonsense=1")
    assert (result.code, result.out) == (1, "")
    assert result.err.splitlines() == [
        "Error: [bold]2 fields[/bold] are wrong. (hyperparameters)",
        "  hyperparameters.nonsense: Unknown field.",
        "invalid_request, request req_1",
    ]
    result = finery("jobs", "get", "job_1")
    assert result.code == 1
    assert result.err.splitlines()[-1].startswith("Hint: check FINERY_API_KEY")


@pytest.mark.parametrize(
    ("command", "said"),
    [
        ("jobs create --set novalue", "expected name=value, found 'novalue'"),
        ("jobs create --set .a=1", "expected name=value"),
        ("jobs create --file nothing.jsonl", "expected the id of a file or the path of one"),
        ("jobs create --spec nothing.json", "nothing.json"),
        ("usage --start 2026-11-01T01:30:00", "expected a time with a zone"),
        ("usage --start yesterday", "found 'yesterday'"),
        ("jobs explode", "explode"),
    ],
)
def test_wrong_usage_ends_with_2_and_sends_nothing(api: Api, finery: Any, command: str, said: str) -> None:
    result = finery(*command.split())
    assert result.code == 2
    assert said in " ".join(result.err.replace("│", "").split())
    assert api.server is not None
    assert api.server.seen == []


def test_an_empty_id_as_an_unset_variable_gives_ends_with_2(api: Api, finery: Any) -> None:
    result = finery("jobs", "get", "")
    assert (result.code, result.err) == (2, "Error: expected the id of a job, found ''\n")


def test_without_a_key_the_command_says_so_and_ends_with_2(finery: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("FINERY_API_KEY", raising=False)
    result = finery("jobs", "list")
    assert (result.code, result.out) == (2, "")
    assert "FINERY_API_KEY" in result.err


def test_without_a_server_the_command_says_where_it_looked(finery: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("FINERY_API_KEY", KEY)
    monkeypatch.setenv("FINERY_BASE_URL", "http://127.0.0.1:1")
    result = finery("jobs", "list")
    assert result.code == 1
    assert "Could not reach GET http://127.0.0.1:1/v1/jobs" in result.err
    assert KEY not in result.err


@pytest.mark.parametrize("id_", ["ckpt_1", "job_1"])
def test_download_fetches_a_checkpoint_or_a_jobs_last_one(api: Api, finery: Any, tmp_path: Path, id_: str) -> None:
    result = finery("checkpoints", "download", id_, "--to", str(tmp_path / "out"))
    assert (result.code, result.out) == (0, f"{tmp_path / 'out'}\n")
    assert (tmp_path / "out" / "sub" / "a.bin").read_bytes() == b"0123456789"
    assert "sha256 verified" in result.err


def test_times_and_groups_of_usage_go_out_as_they_are_meant(api: Api, finery: Any) -> None:
    arguments = [
        "--start",
        "2026-11-01",
        "--end",
        "2026-11-02T00:00:00-05:00",
        "--group-by",
        "sku",
        "--group-by",
        "day",
    ]
    result = finery("usage", *arguments)
    assert result.code == 0
    query = "start=2026-11-01T00%3A00%3A00Z&end=2026-11-02T05%3A00%3A00Z&group_by=sku&group_by=day"
    assert api.sent(f"GET /v1/usage?{query}")
    assert "$0.0000045" in result.out


def test_lists_stop_at_their_limit(api: Api, finery: Any) -> None:
    jobs = [job_json(id=f"job_{n}") for n in range(5)]
    api.answers = {"GET /v1/jobs": (200, page_json(jobs, has_more=True, last_id="job_4"))}
    assert len(json.loads(finery("jobs", "list", "--limit", "3", "--json").out)) == 3
    assert api.sent("GET /v1/jobs?limit=3")
