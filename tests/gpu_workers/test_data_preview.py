"""Previews: what a person sees of a row is what a job would train."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from pydantic import TypeAdapter

from finery.types.previews import PreviewRow
from finery_gpu_workers import run
from finery_protos.v1 import worker_pb2 as pb
from finery_testing.templates import STRIPS_REASONING
from finery_testing.tiny import EOS, IM_END, IM_START, make_tiny_model

from .conftest import MakeJob, ended
from .in_process import Render, rendered
from .samples import HI, HI_OK, OK

__all__ = ["rendered"]  # the fixture

ROWS: TypeAdapter[list[PreviewRow]] = TypeAdapter(list[PreviewRow])


def reported(make_job: MakeJob, data: Any, model: Path | None = None, **wanted: Any) -> pb.ReportPreviewRequest:
    control = make_job(data, model=model)
    control.preview_json = json.dumps({"model": "tiny"} | wanted)
    run.main(control.attempt(pb.ATTEMPT_KIND_PREPARE))
    assert control.previewed is not None, control.finished
    assert control.prepared is None
    return control.previewed


def previewed(make_job: MakeJob, data: Any, model: Path | None = None, **wanted: Any) -> list[PreviewRow]:
    return ROWS.validate_json(reported(make_job, data, model, **wanted).rows_json)


def text_of(row: PreviewRow) -> str:
    return "".join(token.text for token in row.tokens)


def test_every_token_of_f_chat_has_its_text_and_says_whether_it_is_trained(make_job: MakeJob) -> None:
    (row,) = previewed(make_job, [{"messages": HI_OK}])
    assert (row.line, row.trained_tokens, row.truncated, row.dropped, row.problem) == (1, 3, False, None, None)
    assert text_of(row) == "<|im_start|>user\nhi<|im_end|>\n<|im_start|>assistant\nok<|im_end|>\n"
    assert [n for n, token in enumerate(row.tokens) if token.trained] == [21, 22, 23]
    assert [(token.id, token.text) for token in row.tokens[21:24]] == [
        (ord("o"), "o"), (ord("k"), "k"), (IM_END, "<|im_end|>"),
    ]  # fmt: skip
    assert (row.tokens[0].id, row.tokens[0].text) == (IM_START, "<|im_start|>")


def test_bytes_of_one_character_show_it_at_the_first(make_job: MakeJob) -> None:
    rows = [{"text": "é\U0001f600"}]
    (row,) = previewed(make_job, rows)
    assert [token.text for token in row.tokens] == ["é", "", "\U0001f600", "", "", "", "<|eos|>"]
    ids = [{"input_ids": [*"é\U0001f600x".encode(), EOS, 0xC3]}]
    (row,) = previewed(make_job, ids)
    assert [token.text for token in row.tokens] == ["é", "", "\U0001f600", "", "", "", "x", "<|eos|>", "\ufffd"]


def test_rows_of_a_file_from_a_line_on(make_job: MakeJob) -> None:
    rows = [{"text": text} for text in "abcde"]
    assert [(row.line, row.tokens[0].text) for row in previewed(make_job, rows, first_line=2, rows=3)] == [
        (2, "b"), (3, "c"), (4, "d"),
    ]  # fmt: skip
    assert previewed(make_job, rows, first_line=9) == []


def test_what_is_wrong_with_a_row_is_shown_at_the_row(make_job: MakeJob) -> None:
    rows = [{"messages": HI_OK}, {"messages": [HI]}, {"messages": [*HI_OK, HI, OK]}]
    good, bad, long = previewed(make_job, rows, max_length=30, truncation="error")
    assert good.problem is None
    assert bad.problem is not None
    assert (bad.line, bad.problem.code, bad.problem.line) == (2, "last_message_not_assistant", 2)
    assert long.problem is not None
    assert (long.problem.code, long.tokens) == ("row_too_long", ())


@pytest.mark.parametrize(("truncation", "text"), [("right", "abc"), ("left", "de<|eos|>")])
def test_rows_are_shown_as_they_are_cut(make_job: MakeJob, truncation: str, text: str) -> None:
    (row,) = previewed(make_job, [{"text": "abcde"}], max_length=3, truncation=truncation)
    assert (text_of(row), row.truncated, row.trained_tokens) == (text, True, 2)
    assert [token.trained for token in row.tokens] == [False, True, True]


def test_rows_that_a_job_would_leave_out_say_why(make_job: MakeJob) -> None:
    rows = [{"messages": HI_OK}]
    assert [row.dropped for row in previewed(make_job, rows, max_length=20)] == ["no_trainable_tokens"]
    assert [row.dropped for row in previewed(make_job, rows, max_length=20, truncation="drop")] == ["too_long"]


def test_an_unrolled_row_is_shown_turn_by_turn(make_job: MakeJob, tmp_path: Path) -> None:
    model = make_tiny_model(tmp_path / "m")
    (model / "chat_template.jinja").write_text(STRIPS_REASONING)
    thinking = {"role": "assistant", "content": "<think>r</think>a"}
    rows = previewed(make_job, [{"messages": [HI, thinking, HI, thinking]}], model)
    assert [row.line for row in rows] == [1, 1]
    assert [text_of(row).count("<think>r</think>") for row in rows] == [1, 1]
    assert rows[0].trained_tokens == rows[1].trained_tokens == len("<think>r</think>a") + 1


def test_a_template_that_cannot_be_used_ends_the_preview(make_job: MakeJob, tmp_path: Path) -> None:
    model = make_tiny_model(tmp_path / "m")
    (model / "chat_template.jinja").write_text("{% for m in messages %}")
    control = make_job([{"messages": HI_OK}], model=model)
    control.preview_json = json.dumps({"model": "tiny"})
    run.main(control.attempt(pb.ATTEMPT_KIND_PREPARE))
    assert ended(control) == "invalid_data"
    assert control.finished is not None
    assert control.finished.error is not None
    assert control.finished.error.code == "invalid_chat_template"


def test_a_preview_warns_of_what_the_template_leaves_out_of_its_rows(make_job: MakeJob, tmp_path: Path) -> None:
    model = make_tiny_model(tmp_path / "m")  # its template knows neither tools nor reasoning
    tool = {"type": "function", "function": {"name": "f", "description": "d", "parameters": {"type": "object"}}}
    rows = [
        {"messages": HI_OK},
        {"messages": HI_OK, "tools": [tool]},
        {"messages": [HI, {**OK, "reasoning_content": "r"}]},
        {"messages": [HI]},
    ]
    warnings = json.loads(reported(make_job, rows, model).warnings_json)
    found = {warning["code"]: warning["details"][0].get("lines") for warning in warnings}
    assert {code: found[code] for code in ("tools_not_rendered", "reasoning_not_rendered")} == {
        "tools_not_rendered": [2],
        "reasoning_not_rendered": [3],
    }
    assert all(warning["message"].startswith("file: ") for warning in warnings)
    assert json.loads(reported(make_job, rows, model, rows=1).warnings_json) == []


# ---- pairs and prompts


def shown(rendered: Render, rows: list[Any], **settings: Any) -> list[PreviewRow]:
    look = {"first_line": 1, "rows": 10}
    return ROWS.validate_python(rendered(None, rows, preview=look, **settings).result["rows"])


def trained_of(row: PreviewRow) -> str:
    return "".join(token.text for token in row.tokens if token.trained)


def test_both_answers_of_a_pair_are_shown_with_what_is_trained_of_them(rendered: Render) -> None:
    pairs: list[Any] = [
        {"messages": [HI], "chosen": "ok", "rejected": "no"},
        {"prompt": "p", "chosen": "c", "rejected": "r"},
    ]
    rows = shown(rendered, pairs)
    assert [(row.line, row.answer, trained_of(row), row.trained_tokens) for row in rows] == [
        (1, "chosen", "ok<|im_end|>", 3),
        (1, "rejected", "no<|im_end|>", 3),
        (2, "chosen", "c<|eos|>", 2),
        (2, "rejected", "r<|eos|>", 2),
    ]
    assert text_of(rows[1]) == "<|im_start|>user\nhi<|im_end|>\n<|im_start|>assistant\nno<|im_end|>"
    assert text_of(rows[2]) == "pc<|eos|>"


def test_a_pair_is_shown_cut_as_it_is_trained(rendered: Render) -> None:
    row = {"prompt": "pqrs", "chosen": "abcd", "rejected": "x"}
    rows = shown(rendered, [row], max_length=7, truncation="left")
    assert [(text_of(row), row.truncated) for row in rows] == [("rsabcd<|eos|>", True), ("rsx<|eos|>", True)]
    rows = shown(rendered, [row], max_length=3, truncation="drop")
    assert [row.dropped for row in rows] == ["too_long", "too_long"]
    (one,) = shown(rendered, [row], max_length=3, truncation="error")
    assert one.problem is not None
    assert (one.problem.code, one.problem.line) == ("row_too_long", 1)


def test_a_prompt_is_shown_with_the_header_of_its_answer(rendered: Render) -> None:
    rows = shown(rendered, [{"prompt": [HI]}, {"prompt": "xyz"}, {"prompt": "x" * 30}], max_length=21)
    assert text_of(rows[0]) == "<|im_start|>user\nhi<|im_end|>\n<|im_start|>assistant\n"
    assert [(text_of(row), row.trained_tokens, row.dropped) for row in rows[1:]] == [
        ("xyz", 0, None),
        ("", 0, "too_long"),
    ]
