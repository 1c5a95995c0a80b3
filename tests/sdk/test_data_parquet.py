"""Rows of parquet files: the same as those of JSONL, in bounded memory, whatever is wrong with the file."""

from __future__ import annotations

import json
import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from finery.data import parquet
from finery.data.check import Report, check_file, check_parquet
from finery.data.rows import ChatRow, read_row
from finery.types.errors import Problem

USER, OK = {"role": "user", "content": "hi"}, {"role": "assistant", "content": "ok"}
Write = Callable[..., Path]


@pytest.fixture
def write(tmp_path: Path) -> Write:
    def _write(rows: list[dict[str, Any]] | pa.Table, **options: Any) -> Path:
        path = tmp_path / "rows.parquet"
        if not isinstance(rows, pa.Table):
            names = dict.fromkeys(name for row in rows for name in row)  # pyarrow takes those of the first row only
            rows = pa.table({name: [row.get(name) for row in rows] for name in names})
        pq.write_table(rows, path, **options)
        return path

    return _write


def calling(arguments: str) -> dict[str, Any]:
    call = {"id": "c1", "type": "function", "function": {"name": "f", "arguments": arguments}}
    return {"role": "assistant", "content": None, "tool_calls": [call]}


def only(path: Path) -> Problem:
    (problem,) = check_parquet(path).problems
    assert problem.message
    assert problem.hint
    return problem


ROWS: list[dict[str, Any]] = [
    {"messages": [USER, OK]},
    {"messages": [{"role": "system", "content": "s"}, USER, {**OK, "weight": 0}, USER, {**OK, "reasoning": "r"}]},
    {
        "messages": [USER, calling('{"city": "Oslo"}')],
        "tools": '[{"type":"function","function":{"name":"f","x":null}}]',
    },
    {
        "messages": [
            USER,
            calling('{"zip": "0150", "n": null}'),
            {"role": "tool", "content": "", "tool_call_id": "c1"},
            OK,
        ]
    },
]


@pytest.mark.parametrize("as_text", [False, True])
def test_a05_rows_are_what_the_same_rows_are_in_jsonl(write: Write, as_text: bool) -> None:
    columns = [{**row, "messages": json.dumps(row["messages"])} for row in ROWS] if as_text else ROWS
    found = [(number, read_row(value)) for number, value in parquet.rows(write(columns))]
    lines = [row | ({"tools": json.loads(row["tools"])} if "tools" in row else {}) for row in ROWS]
    assert found == [(number, read_row(row)) for number, row in enumerate(lines, 1)]
    third, fourth = found[2][1], found[3][1]
    assert isinstance(third, tuple)
    assert isinstance(fourth, tuple)
    assert isinstance(third[1], ChatRow)
    assert isinstance(fourth[1], ChatRow)
    assert third[1].tools == ({"type": "function", "function": {"name": "f", "x": None}},), "an uploaded null stays"
    arguments = fourth[1].messages[1]["tool_calls"][0]["function"]["arguments"]
    assert arguments == {"zip": "0150", "n": None}, "no key of another row"


@pytest.mark.parametrize(
    ("rows", "format_"),
    [
        ([{"prompt": "p", "completion": "c", "id": 1}], "completion"),
        ([{"prompt": [USER], "completion": [OK]}], "completion"),
        ([{"text": "t"}], "text"),
        ([{"input_ids": [1, 2], "labels": [-100, 2], "attention_mask": [1, 1]}], "tokens"),
        ([{"prompt": "p", "chosen": "a", "rejected": "b"}], "preference"),
        ([{"prompt": [USER], "chosen": [OK], "rejected": [OK, USER, OK]}], "preference"),
        ([{"messages": [USER], "chosen": "a", "rejected": "b"}], "preference"),
        ([{"chosen": [USER, OK], "rejected": [USER, calling("{}")]}], "preference"),
        ([{"prompt": "p", "n": 7, "meta": {"tags": ["a"], "x": 0.5, "ok": True}}], "prompts"),
        ([{"messages": [USER, OK, USER], "answer": "a"}], "prompts"),
    ],
)
def test_every_format_comes_in_columns(write: Write, rows: list[dict[str, Any]], format_: str) -> None:
    report = check_parquet(write(rows))
    assert (report.status, report.format, report.encoding, report.rows) == ("valid", format_, "parquet", 1)
    assert [read_row(value) for _, value in parquet.rows(write(rows))] == [read_row(row) for row in rows]


@pytest.mark.parametrize(
    "column",
    [
        pa.array(["a", "b", "a"]).dictionary_encode(),
        pa.array(["a", "b", "a"], pa.large_string()),
        pa.chunked_array([["a"], ["b", "a"]]),
    ],
)
def test_texts_in_other_layouts_are_texts(write: Write, column: Any) -> None:
    assert [value for _, value in parquet.rows(write(pa.table({"text": column})))] == [
        {"text": "a"},
        {"text": "b"},
        {"text": "a"},
    ]


def test_lists_in_other_layouts_are_lists(write: Write) -> None:
    ids = pa.array([[1, 2], [3, 4]], pa.list_(pa.uint16(), 2))
    labels = pa.array([[1, 2], None], pa.large_list(pa.int64()))
    found = [value for _, value in parquet.rows(write(pa.table({"input_ids": ids, "labels": labels})))]
    assert found == [{"input_ids": [1, 2], "labels": [1, 2]}, {"input_ids": [3, 4]}]


def test_bad_rows_are_named_by_their_number(write: Write) -> None:
    rows = [{"messages": [USER, OK]}] * 3000 + [{"messages": [USER]}, {"messages": None}, {"messages": [OK]}]
    report = check_parquet(write(rows, row_group_size=1000))
    assert (report.status, report.rows, report.problem_count) == ("invalid", 3000, 3)
    assert [(p.line, p.code, p.offset) for p in report.problems] == [
        (3001, "last_message_not_assistant", None),
        (3002, "missing_messages", None),
        (3003, "no_user_message", None),
    ]


@pytest.mark.parametrize(
    ("text", "code", "path"),
    [
        ("{", "invalid_json", "messages"),
        ("", "invalid_json", "messages"),
        ("7", "wrong_type", "messages"),
        ('[{"role": "user", "role": "user"}]', "duplicate_key", "messages[0].role"),
        (r'[{"role": "user", "content": "\ud83d"}]', "invalid_unicode", "messages[0].content"),
        (r'[{"role": "user", "content": "\u0000"}]', "nul_character", "messages[0].content"),
        ('[{"role": "user", "content": NaN}]', "invalid_json", "messages[0].content"),
    ],
)
def test_a28_json_text_in_a_column_is_read_strictly(write: Write, text: str, code: str, path: str) -> None:
    problem = only(write([{"messages": text}]))
    assert (problem.line, problem.code, problem.path) == (1, code, path)


def test_a28_nul_and_bytes_that_are_no_text_in_a_column(write: Write) -> None:
    assert only(write([{"text": "a\0b"}])).code == "nul_character"
    offsets, data = pa.py_buffer(b"\0\0\0\0\1\0\0\0\3\0\0\0\4\0\0\0"), pa.py_buffer(b"a\xff\xfeb")
    path = write(pa.table({"text": pa.Array.from_buffers(pa.string(), 3, [None, offsets, data])}))
    report = check_parquet(path)
    assert [(p.line, p.code) for p in report.problems] == [(2, "invalid_utf8")]
    assert "0xFF" in report.problems[0].message
    assert report.rows == 2


STRUCT = {"type": "function", "function": {"name": "f", "arguments": {"city": "Oslo"}}}


@pytest.mark.parametrize(
    ("row", "code", "path"),
    [
        (
            {"messages": [USER, {**OK, "tool_calls": [STRUCT]}]},
            "wrong_type",
            "messages[].tool_calls[].function.arguments",
        ),
        ({"messages": [USER, OK], "tools": [STRUCT]}, "wrong_type", "tools"),
        ({"messages": USER}, "wrong_type", "messages"),
        ({"text": 7}, "wrong_type", "text"),
        ({"text": b"t"}, "wrong_type", "text"),
        ({"input_ids": [1.5]}, "wrong_type", "input_ids"),
        ({"input_ids": "1 2"}, "wrong_type", "input_ids"),
        ({"prompt": "a", "chosen": 1, "rejected": "b"}, "wrong_type", "chosen"),
        ({"question": "a", "answer": "b"}, "missing_messages", "messages"),
        ({"messages": [USER, OK], "functions": "[]"}, "unsupported_field", "functions"),
    ],
)
def test_columns_that_no_row_can_have_are_one_problem_of_the_file(
    write: Write, row: dict[str, Any], code: str, path: str
) -> None:
    problem = only(write([row] * 500))
    assert (problem.line, problem.code, problem.path) == (None, code, path)


def test_a_column_that_comes_twice_is_refused(write: Write) -> None:
    assert only(write(pa.Table.from_arrays([pa.array(["a"])] * 2, ["text", "text"]))).code == "duplicate_key"


def test_no_rows_no_columns_and_columns_of_nulls(write: Write) -> None:
    assert only(write(pa.table({"text": pa.array([], pa.string())}))).code == "empty_file"
    assert only(write(pa.table({}))).code == "empty_file"
    assert only(write(pa.table({"text": pa.nulls(1)}))).code == "missing_messages"


# ---- files that are broken


def test_files_that_are_cut_short_or_damaged_are_named(write: Write) -> None:
    rows = pa.table({"text": [f"{n} {'abc' * 50}" for n in range(5000)]})
    path = write(rows, compression=None, use_dictionary=False, row_group_size=1000)
    whole = path.read_bytes()
    for content in (
        b"PAR1",
        b"PAR1PAR1",
        whole[:-1],
        whole[: len(whole) // 2],
        whole[:-8] + b"\xff\xff\xff\x7fPAR1",
        whole[:-8] + b"\0\0\0\0PAR1",
        whole[:-2000] + os.urandom(1992) + whole[-8:],
    ):
        path.write_bytes(content)
        assert check_file(path).encoding == "parquet"
        assert only(path).code == "invalid_parquet"
    middle = len(whole) // 2
    path.write_bytes(whole[:middle] + b"\xff" * 1000 + whole[middle + 1000 :])
    report = check_parquet(path)
    assert 1000 <= report.rows < 5000, "what comes before the damage is read"
    assert (report.problems[-1].code, report.problems[-1].line) == ("invalid_parquet", report.rows + 1)
    assert "rows.parquet" not in report.problems[-1].message, "a server's path is nobody's business"


def test_random_damage_never_raises(write: Write) -> None:
    path = write(ROWS * 50, row_group_size=40)
    whole = path.read_bytes()
    for seed in range(200):
        content = bytearray(whole)
        place = 4 + (seed * 7919) % (len(whole) - 12)
        content[place] ^= 1 + seed % 255
        path.write_bytes(content)
        report = check_parquet(path)
        assert isinstance(report, Report)
        assert (report.status == "valid") == (report.problem_count == 0)


def test_encrypted_files_are_named(tmp_path: Path) -> None:
    encryption = pytest.importorskip("pyarrow.parquet.encryption")

    class Kms(encryption.KmsClient):  # type: ignore[misc, name-defined]
        """Wraps keys in nothing: whoever reads has no key at all."""

        def __init__(self, _config: Any) -> None:
            super().__init__()

        def wrap_key(self, key_bytes: bytes, _master: str) -> bytes:
            return key_bytes.hex().encode()

        def unwrap_key(self, wrapped: bytes, _master: str) -> bytes:
            return bytes.fromhex(wrapped.decode())

    for plaintext_footer in (False, True):
        settings = encryption.EncryptionConfiguration(
            footer_key="f", column_keys={"c": ["text"]}, plaintext_footer=plaintext_footer
        )
        factory = encryption.CryptoFactory(Kms)
        properties = factory.file_encryption_properties(encryption.KmsConnectionConfig(), settings)
        path = tmp_path / "secret.parquet"
        pq.write_table(pa.table({"text": ["a"]}), path, encryption_properties=properties)
        assert only(path).code == "encrypted_parquet"


# ---- memory


def test_a_row_group_of_any_size_is_streamed(write: Write) -> None:
    texts = [os.urandom(5000).hex() for _ in range(10_000)]
    path = write(pa.table({"text": texts}), compression=None, row_group_size=10_000)
    del texts
    assert path.stat().st_size > 95e6
    before, most = pa.total_allocated_bytes(), 0
    for _number, _value in parquet.rows(path):
        most = max(most, pa.total_allocated_bytes() - before)
    assert most < 30e6


def test_a32_rows_that_are_too_long_are_named_and_the_others_count(write: Write) -> None:
    path = write(pa.table({"text": ["a", "x" * (parquet.MAX_ROW_BYTES + 1), "b"]}))
    report = check_parquet(path)
    assert (report.rows, [(p.line, p.code) for p in report.problems]) == (2, [(2, "line_too_long")])
    assert str(parquet.MAX_ROW_BYTES) in report.problems[0].message
