"""Cases of ../shared/cases/a-sft-data.md as a job meets them: uploaded bytes in, stored ids and the report out."""

from __future__ import annotations

import io
import json
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from finery.types.data import DataReport
from finery.types.methods import FullWeights
from finery_gpu_workers import run
from finery_gpu_workers.data import prepared
from finery_gpu_workers.data.tokens import TokenRow
from finery_protos.v1 import worker_pb2 as pb
from finery_testing.control_plane import FakeControlPlane
from finery_testing.templates import QWEN3, STRIPS_REASONING
from finery_testing.tiny import CHAT_TEMPLATE, EOS, IM_END, make_tiny_model

from .conftest import MakeJob, as_jsonl, ended
from .samples import HI, HI_OK, OK, text_of, whole

THINKING = {"role": "assistant", "content": "<think>r</think>a"}


def with_template(folder: Path, source: str) -> Path:
    make_tiny_model(folder)
    (folder / "chat_template.jinja").write_text(source)
    return folder


def prepare(control: FakeControlPlane) -> tuple[list[TokenRow], DataReport]:
    """The stored training samples and the report."""
    run.main(control.attempt(pb.ATTEMPT_KIND_PREPARE))
    assert control.prepared is not None, control.finished
    data = prepared.load(control.store / control.prepared.prepared_prefix)
    report = DataReport.model_validate_json(control.prepared.statistics_json)
    return [data.train.row(n) for n in range(len(data.train))], report


def refusal(control: FakeControlPlane, reason: str = "invalid_data") -> tuple[str, str | None, list[dict[str, Any]]]:
    """Code, param and details of the error that the job ends with."""
    run.main(control.attempt(pb.ATTEMPT_KIND_PREPARE))
    assert ended(control) == reason
    assert control.finished is not None
    assert control.finished.error is not None
    error = control.finished.error
    return error.code, error.param, error.details or []


def parquet(**columns: list[Any]) -> bytes:
    file = io.BytesIO()
    pq.write_table(pa.table(columns), file)
    return file.getvalue()


def asking(arguments: Any) -> list[dict[str, Any]]:
    function = {"name": "f", "arguments": arguments}
    calls = [{"id": "c1", "type": "function", "function": function}]
    return [HI, {"role": "assistant", "content": None, "tool_calls": calls}]


TOOLS = [
    {"type": "function", "function": {"name": "f", "parameters": {"properties": {"city": {"type": "string"}}}}},
    {"type": "function", "function": {"name": "f", "parameters": {"properties": {"zip": {"default": None}, "n": {}}}}},
]


@pytest.mark.parametrize("encoding", ["jsonl", "parquet"])
def test_a04_a05_rows_keep_their_own_keys_and_types_in_the_prompt(
    make_job: MakeJob, tmp_path: Path, encoding: str
) -> None:
    given = [{"city": "Oslo", "at": "2026-01-02"}, {"zip": "0150", "n": None, "at": 1767312000}]
    rows = [{"messages": asking(a), "tools": [tool]} for a, tool in zip(given, TOOLS, strict=True)]
    file = as_jsonl(rows)
    if encoding == "parquet":
        file = parquet(**{key: [json.dumps(row[key]) for row in rows] for key in ("messages", "tools")})
    control = make_job(file, model=with_template(tmp_path / "m", QWEN3))
    control.training_encoding = encoding
    samples, report = prepare(control)
    for sample, arguments, tool in zip(samples, given, TOOLS, strict=True):
        assert text_of(sample).partition("<tool_call>\n")[2] == (
            f'{{"name": "f", "arguments": {json.dumps(arguments)}}}\n</tool_call>$'
        )
        assert f"<tools>\n{json.dumps(tool)}\n</tools>" in whole(sample)
    assert [row.rows for row in report.sets.values()] == [2]
    assert report.warnings == ()


def test_parquet_rows_are_prepared_as_the_same_rows_of_jsonl(make_job: MakeJob) -> None:
    rows: list[dict[str, Any]] = [{"messages": HI_OK}, {"messages": [*HI_OK, HI, OK | {"weight": 0}]}]
    control = make_job(parquet(messages=[row["messages"] for row in rows]))
    control.training_encoding = "parquet"
    for found, expected in zip(prepare(control)[0], prepare(make_job(rows))[0], strict=True):
        assert found.tokens.tolist() == expected.tokens.tolist()
        assert found.mask.tolist() == expected.mask.tolist()


def test_a08_a13_report_and_masks_agree(make_job: MakeJob) -> None:
    messages = [HI, OK | {"weight": 0}, HI, OK | {"weight": 1}]
    samples, report = prepare(make_job([{"messages": messages}]))
    train = report.sets["train"]
    assert (train.tokens, train.trained_tokens, train.rows, train.format) == (50, 3, 1, "chat")
    assert samples[0].mask.nonzero()[0].tolist() == [46, 47, 48]


def test_a13_a_prompt_of_21_tokens_before_a_completion_of_3(make_job: MakeJob) -> None:
    samples, report = prepare(make_job([{"prompt": [HI], "completion": [OK]}]))
    assert samples[0].mask.nonzero()[0].tolist() == [21, 22, 23]
    assert report.sets["train"].format == "completion"


def test_a14_no_reasoning_is_lost_without_a_word(make_job: MakeJob, tmp_path: Path) -> None:
    rows = [{"messages": [HI, THINKING, HI, THINKING]}, {"messages": HI_OK}]
    samples, report = prepare(make_job(rows, model=with_template(tmp_path / "m", STRIPS_REASONING)))
    assert [text_of(sample) for sample in samples] == ["<think>r</think>a$", "<think>r</think>a$", "ok$"]
    train = report.sets["train"]
    assert (train.rows, train.unrolled_rows, train.dropped_rows) == (2, 1, 0)
    # `<think>r</think>` is 7 + 1 + 8 bytes, twice
    assert (train.reasoning_tokens_in_data, train.reasoning_tokens_trained) == (32, 32)
    # The first turn alone is 10 + 11 + 17 + 2; the second follows it without its reasoning: 24 + 40.
    assert train.tokens == 40 + 64 + 25
    assert report.warnings == ()


def test_a14_what_a_template_never_shows_is_warned_about_with_the_exact_count(
    make_job: MakeJob, tmp_path: Path
) -> None:
    always = STRIPS_REASONING.replace("loop.index0 < ns.last and ", "")
    rows = [{"messages": HI_OK}, {"messages": [HI, THINKING, HI, THINKING]}]
    _, report = prepare(make_job(rows, validation=rows[1:], model=with_template(tmp_path / "m", always)))
    train = report.sets["train"]
    assert (train.reasoning_tokens_in_data, train.reasoning_tokens_trained) == (32, 0)
    warnings = [warning for warning in report.warnings if warning.code != "validation_overlap"]
    found = {(warning.code, warning.param): warning for warning in warnings}
    assert len(found) == len(warnings) == 4
    assert found["reasoning_not_trained", "training_file"].details == [{"tokens": 32}]
    assert found["reasoning_not_rendered", "training_file"].details == [{"rows": 1, "lines": [2]}]
    assert found["reasoning_not_trained", "validation_file"].details == [{"tokens": 32}]


def test_a17_the_end_of_turn_is_trained_where_it_is_the_padding_token_too(make_job: MakeJob, tmp_path: Path) -> None:
    model = make_tiny_model(tmp_path / "m", pad_token_id=IM_END)
    for name in ("tokenizer_config", "special_tokens_map"):
        settings = model / f"{name}.json"
        content = json.loads(settings.read_text()) if settings.exists() else {}
        settings.write_text(json.dumps(content | {"pad_token": "<|im_end|>", "eos_token": "<|im_end|>"}))
    samples, _ = prepare(make_job([{"messages": HI_OK}, {"messages": [HI, OK | {"content": ""}]}], model=model))
    assert [len(sample.tokens) for sample in samples] == [25, 23]
    assert [sample.mask.nonzero()[0].tolist() for sample in samples] == [[21, 22, 23], [21]]
    assert samples[0].tokens[23] == samples[1].tokens[21] == IM_END


def test_a18_a_row_that_is_cut_before_its_answer_is_dropped_and_counted(make_job: MakeJob) -> None:
    short = {"prompt": "a", "completion": "bc"}
    rows = [short, short, {"prompt": "a" * 20, "completion": "b"}, short]
    samples, report = prepare(make_job(rows, max_length=20))
    train = report.sets["train"]
    assert (train.rows, train.dropped_rows, train.dropped_lines) == (3, 1, (3,))
    assert train.dropped == {"no_trainable_tokens": 1}
    assert (train.trained_tokens, len(samples)) == (9, 3)
    assert (train.longest, train.shortest) == (22, 4)


def test_a26_rows_are_cut_on_the_side_that_is_asked_for(make_job: MakeJob) -> None:
    rows = [{"input_ids": [1, 2, 3, 4, 5, 6]}]
    for truncation, tokens in (("right", [1, 2, 3, 4]), ("left", [3, 4, 5, 6])):
        control = make_job(rows, max_length=4, truncation=truncation)
        samples, report = prepare(control)
        assert samples[0].tokens.tolist() == tokens
        assert (report.sets["train"].trained_tokens, report.sets["train"].truncated_rows) == (3, 1)
        assert report.template_sha256 is None
        assert control.prepared is not None
        assert control.prepared.total_trained_tokens == 3


def test_rows_that_must_not_be_cut_end_the_job_with_their_lines(make_job: MakeJob) -> None:
    rows = [{"text": "abc"}, {"text": "a" * 9}, {"text": "a" * 8}]
    code, param, details = refusal(make_job(rows, max_length=8, truncation="error"))
    assert (code, param, [d["line"] for d in details]) == ("row_too_long", "training_file", [2, 3])
    assert "at most 8 tokens (hyperparameters.max_length), found 10" in details[0]["message"]
    _, report = prepare(make_job(rows, max_length=8, truncation="drop"))
    assert (report.sets["train"].dropped, report.sets["train"].truncated_rows) == ({"too_long": 2}, 0)


def test_ids_that_the_model_has_no_row_for_are_named_by_line(make_job: MakeJob) -> None:
    code, _, details = refusal(make_job([{"input_ids": [1, 260]}, {"input_ids": [1, 261, 5]}]))
    assert (code, [(d["line"], d["path"]) for d in details]) == ("token_out_of_range", [(2, "input_ids[1]")])


@pytest.mark.parametrize(
    ("row", "train_on"), [({"text": "a"}, "last"), ({"text": "a"}, "completion"), ({"messages": HI_OK}, "completion")]
)
def test_train_on_that_has_no_meaning_ends_the_job(make_job: MakeJob, row: dict[str, Any], train_on: str) -> None:
    code, param, _ = refusal(make_job([row], train_on=train_on))
    assert (code, param) == ("train_on_not_possible", "hyperparameters.train_on")


def test_text_needs_no_chat_template(make_job: MakeJob, tmp_path: Path) -> None:
    model = make_tiny_model(tmp_path / "m")
    (model / "chat_template.jinja").unlink()
    samples, report = prepare(make_job([{"text": "abc"}], model=model))
    assert samples[0].tokens.tolist() == [*b"abc", EOS]
    assert report.template_sha256 is None
    assert refusal(make_job([{"messages": HI_OK}], model=model))[0] == "invalid_chat_template"


def test_added_tokens_are_one_token_each_and_counted_in_the_vocabulary(make_job: MakeJob) -> None:
    control = make_job(
        [{"text": "x<a>"}], spec={"added_tokens": ("<a>", "<|im_end|>")}, adapter=FullWeights(type="full")
    )
    samples, report = prepare(control)
    assert samples[0].tokens.tolist() == [ord("x"), 261, EOS]
    assert report.vocab_size == 262


def test_a30_parts_of_other_kinds_are_refused_by_line(make_job: MakeJob) -> None:
    image = {"type": "image", "image": "x"}
    rows = [{"messages": HI_OK}, {"messages": [HI | {"content": [image]}, OK]}]
    code, _, details = refusal(make_job(rows))
    assert (code, details[0]["line"]) == ("unsupported_content_part", 2)
    assert "image" in details[0]["message"]


def test_a31_every_line_that_the_template_refuses_is_listed(make_job: MakeJob, tmp_path: Path) -> None:
    refuse = "{% if messages[0].role == 'system' %}{{ raise_exception('system role not supported') }}{% endif %}"
    system = {"messages": [{"role": "system", "content": "x"}, *HI_OK]}
    rows = [system, {"messages": HI_OK}, system]
    code, param, details = refusal(make_job(rows, model=with_template(tmp_path / "m", refuse + CHAT_TEMPLATE)))
    assert (code, param, [d["line"] for d in details]) == ("template_error", "training_file", [1, 3])
    assert "system role not supported" in details[0]["message"]
