"""`finery files check`: what an upload would be told, on this machine alone."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from finery.cli import main
from finery.data.check import check_file

GOOD = b'{"messages":[{"role":"user","content":"hi"},{"role":"assistant","content":"ok"}]}\n'


@pytest.fixture(autouse=True)
def _nobody_to_ask(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("FINERY_API_KEY", raising=False)
    monkeypatch.setenv("FINERY_BASE_URL", "http://127.0.0.1:1")


def checked(*arguments: str) -> object:
    """The command's exit code."""
    with pytest.raises(SystemExit) as ended:
        main(["files", "check", *arguments])
    return ended.value.code


def test_a_good_file_is_valid(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path = tmp_path / "rows.jsonl"
    path.write_bytes(GOOD * 3)
    assert checked(str(path)) == 0
    shown = capsys.readouterr().out
    for fact in ("valid", "chat jsonl", "3"):
        assert fact in shown


def test_errors_are_a_table_and_the_exit_code(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path = tmp_path / "rows.jsonl"
    path.write_bytes(GOOD + b'{"messages":[{"role":"[bold]\\u001b[2J"}]}\n' + b"7\n" * 200)
    assert checked(str(path)) == 1
    shown = capsys.readouterr()
    lines = shown.out.splitlines()
    (head,) = [line for line in lines if line.startswith("line")]
    assert head.split() == ["line", "path", "code", "message", "hint"]
    rows = lines[lines.index(head) + 1 :]
    assert len(rows) == 100
    assert rows[0].split()[:3] == ["2", "messages[0].role", "unknown_role"]
    assert "[bold]" in rows[0], "nothing of the file is markup"
    assert "\x1b[2J" not in shown.out, "or steers the terminal"
    assert rows[1].split()[:2] == ["3", "not_an_object"]
    assert "101 more" in shown.err


@pytest.mark.parametrize("encoding", ["jsonl", "parquet"])
def test_json_is_the_whole_report(tmp_path: Path, capsys: pytest.CaptureFixture[str], encoding: str) -> None:
    path = tmp_path / "any name"
    if encoding == "jsonl":
        path.write_bytes(b'{"text":"a"}\n{"text":7}\n')
    else:
        pq.write_table(pa.table({"text": ["a", None]}), path)
    assert checked(str(path), "--json") == 1
    report = json.loads(capsys.readouterr().out)
    assert (report["status"], report["format"], report["encoding"], report["rows"]) == ("invalid", "text", encoding, 1)
    assert [problem["line"] for problem in report["problems"]] == [2]


@pytest.mark.parametrize("encoding", ["jsonl", "parquet"])
def test_progress_goes_up_to_the_files_size(tmp_path: Path, encoding: str) -> None:
    path = tmp_path / "rows"
    if encoding == "jsonl":
        path.write_bytes(GOOD * 50_000)
    else:
        pq.write_table(pa.table({"text": [str(number) for number in range(5000)]}), path)
    told: list[tuple[int, int]] = []
    assert check_file(path, lambda done, total: told.append((done, total))).status == "valid"
    size = path.stat().st_size
    assert told[-1] == (size, size)
    assert told == sorted(told)
    assert len(told) > 3
    assert {total for _, total in told} == {size}


def test_without_pyarrow_parquet_says_what_is_missing(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    path = tmp_path / "rows.parquet"
    pq.write_table(pa.table({"text": ["a"]}), path)
    monkeypatch.setitem(sys.modules, "pyarrow.parquet", None)
    assert checked(str(path)) == 2
    assert "pip install 'finery[parquet]'" in capsys.readouterr().err
    path.write_bytes(GOOD)
    assert checked(str(path)) == 0


def test_a_file_that_is_not_there_is_wrong_usage(tmp_path: Path) -> None:
    assert checked(str(tmp_path / "none")) == 2


def test_checking_lines_loads_neither_an_http_client_nor_pyarrow() -> None:
    code = "import sys, finery.data.check; print({'httpx', 'pyarrow', 'typer'} & set(sys.modules))"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True, timeout=60)
    assert done.stdout.strip() == "set()"
