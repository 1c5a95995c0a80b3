"""Parquet uploads: known by their content, checked apart, refused without harm."""

from __future__ import annotations

import asyncio
import io
import json
import tempfile
import time
from pathlib import Path
from typing import Any

import psutil
import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from finery_service.files import child
from finery_service.files.checks import Limits, check_apart
from finery_testing.api import CHAT_ROW, Api, jsonl

USER, OK = {"role": "user", "content": "hi"}, {"role": "assistant", "content": "ok"}


def parquet(rows: list[dict[str, Any]] | pa.Table, **options: Any) -> bytes:
    if not isinstance(rows, pa.Table):
        names = dict.fromkeys(name for row in rows for name in row)
        rows = pa.table({name: [row.get(name) for row in rows] for name in names})
    sink = io.BytesIO()
    pq.write_table(rows, sink, **options)
    return sink.getvalue()


@pytest.mark.parametrize("name", ["rows.parquet", "rows.jsonl"])
async def test_parquet_is_taken_by_its_content_whatever_its_name(api: Api, name: str) -> None:
    door = await api.tenant()
    content = parquet([CHAT_ROW] * 5)
    file = (await door.upload(content, name)).json()
    assert (file["status"], file["encoding"], file["format"], file["rows"]) == ("valid", "parquet", "chat", 5)
    (key,) = [key for key in api.objects() if file["id"] in key]
    assert (api.store_folder / key).read_bytes() == content
    job = await door.job(training_file=file["id"])
    assert job.status_code == 201, job.text


async def test_jsonl_is_taken_by_its_content_whatever_its_name(api: Api) -> None:
    door = await api.tenant()
    file = (await door.upload(jsonl(CHAT_ROW), "rows.parquet")).json()
    assert (file["status"], file["encoding"], file["rows"]) == ("valid", "jsonl", 1)


async def test_a31_rows_of_parquet_are_named_by_number(api: Api) -> None:
    door = await api.tenant()
    system = {"role": "system", "content": "s"}
    chats: list[list[dict[str, Any]]] = [
        [USER, OK, USER, USER],
        [system, system, USER, OK],
        [USER, system, OK],
        [system, USER, OK],
        [OK],
        [{"role": "human", "content": "hi"}, OK],
        [USER, {"role": "tool", "content": "r", "tool_call_id": "c9"}, OK],
        [USER, {**OK, "weight": 2}],
    ]
    file = (await door.upload(parquet([{"messages": messages} for messages in chats]))).json()
    assert [(error["line"], error["code"]) for error in file["errors"]] == [
        (1, "last_message_not_assistant"),
        (2, "role_order"),
        (3, "role_order"),
        (5, "no_user_message"),
        (6, "unknown_role"),
        (7, "unmatched_tool_call_id"),
        (8, "invalid_weight"),
    ]
    assert (file["status"], file["rows"], file["error_count"]) == ("invalid", 1, 7)
    answer = await door.job(training_file=file["id"])
    assert (answer.status_code, answer.json()["error"]["code"]) == (400, "invalid_file")


async def test_a28_strange_text_in_parquet_can_be_stored_and_read(api: Api) -> None:
    door = await api.tenant()
    texts = [
        r'[{"role":"a\u0000\ud83d"}]',
        '[{"role":"\u2028\x85"}]',
        json.dumps([USER, {**OK, "content": "\U0001f600"}]),
    ]
    answer = await door.upload(parquet([{"messages": text} for text in texts]))
    assert [error["code"] for error in answer.json()["errors"]] == ["nul_character", "unknown_role"]
    assert (await door.get(f"/v1/files/{answer.json()['id']}")).json() == answer.json()


@pytest.mark.parametrize("content", [b"PAR1", b"PAR1" + b"\0" * 5000, parquet([CHAT_ROW])[:-1], b"PAREjunk"])
async def test_broken_parquet_is_an_invalid_file_not_an_error(api: Api, content: bytes) -> None:
    door = await api.tenant()
    answer = await door.upload(content, "rows.parquet")
    file = answer.json()
    assert (answer.status_code, file["status"], file["encoding"]) == (201, "invalid", "parquet")
    (error,) = file["errors"]
    assert (error["code"], error["line"]) == ("invalid_parquet", None)
    assert error["hint"]


# ---- the child


async def apart(content: bytes, limits: Limits | None = None) -> Any:
    with tempfile.TemporaryFile() as file:
        file.write(content)
        file.flush()
        return await check_apart(file, len(content), limits or Limits())


def children() -> list[psutil.Process]:
    return psutil.Process().children(recursive=True)


async def test_a_page_that_does_not_fit_the_childs_memory_is_the_files_fault() -> None:
    # One value of 20 MB stands in the file once; a batch of rows that all have it would be 20 GB.
    text = pa.DictionaryArray.from_arrays(pa.array([0] * 1000, pa.int32()), pa.array(["x" * 20_000_000]))
    content = parquet(pa.table({"text": text}), store_schema=False)
    assert len(content) < 5_000_000
    report = await apart(content)
    assert [problem.code for problem in report.problems] == ["parquet_too_large"]
    assert str(child.MEMORY_BYTES) in report.problems[0].message


async def test_a_check_that_takes_too_long_is_killed() -> None:
    # Twenty million empty rows in a few kilobytes.
    content = parquet(pa.table({"text": pa.nulls(20_000_000, pa.string())}))
    before = {process.pid for process in children()}
    start = time.monotonic()
    report = await apart(content, Limits(start=3.0, bytes_per_second=1e9))
    assert [problem.code for problem in report.problems] == ["parquet_too_slow"]
    assert time.monotonic() - start < 30
    assert {process.pid for process in children()} <= before


async def test_a_child_that_is_killed_is_no_fault_of_ours_and_one_that_waits_dies_with_its_request() -> None:
    content = parquet(pa.table({"text": pa.nulls(20_000_000, pa.string())}))
    before = {process.pid for process in children()}
    task = asyncio.create_task(apart(content))
    process = await started(before)
    process.kill()
    assert [problem.code for problem in (await task).problems] == ["invalid_parquet"]
    task = asyncio.create_task(apart(content))
    process = await started(before)
    task.cancel()
    with pytest.raises(asyncio.CancelledError):
        await task
    assert not process.is_running()


async def started(before: set[int]) -> psutil.Process:
    """The child, once it has set itself its limits."""
    while True:
        for process in children():
            if process.pid not in before and process.rlimit(psutil.RLIMIT_FSIZE) == (0, 0):
                return process
        await asyncio.sleep(0.01)


async def test_the_child_has_no_environment_and_its_limits(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("FINERY_SYSTEM_DSN", "postgresql://secret")
    content = parquet(pa.table({"text": pa.nulls(20_000_000, pa.string())}))
    before = {process.pid for process in children()}
    task = asyncio.create_task(apart(content))
    process = await started(before)
    environment = (Path("/proc") / str(process.pid) / "environ").read_bytes()
    assert b"FINERY" not in environment
    assert b"secret" not in environment
    assert process.rlimit(psutil.RLIMIT_AS) == (child.MEMORY_BYTES, child.MEMORY_BYTES)
    task.cancel()
    with pytest.raises(asyncio.CancelledError):
        await task
