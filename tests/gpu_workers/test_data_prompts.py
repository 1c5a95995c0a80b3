"""Prompts of RL: what is sampled from, what is held out, what graders get."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from tokenizers import processors

from finery.types.data import DataReport
from finery.types.ids import new_id
from finery_gpu_workers import run
from finery_gpu_workers.data import prepared
from finery_gpu_workers.data.prompts import PromptSet
from finery_gpu_workers.errors import WorkerError
from finery_protos.v1 import worker_pb2 as pb
from finery_testing.control_plane import FakeControlPlane
from finery_testing.tiny import BOS, CHAT_TEMPLATE, IM_END, byte_tokenizer, make_tiny_model

from .conftest import MakeJob, ended
from .in_process import Render, Rendered, rendered
from .samples import HI, OK

__all__ = ["rendered"]  # the fixture

HEADER = [259, *b"assistant\n"]
PROMPT = [259, *b"user\nhi", IM_END, 10, *HEADER]
GRADER = {"type": "string_check", "operation": "eq", "reference": "{{ item.answer }}"}
ENVIRONMENT = {"type": "prompts", "file": new_id("file", 0), "grader": GRADER}


def numbered(count: int) -> list[dict[str, Any]]:
    """Prompts of as many tokens as their place in the file."""
    return [{"prompt": "x" * n, "answer": n} for n in range(1, count + 1)]


def places(found: Rendered, name: str = "train") -> list[int]:
    prompts = PromptSet(found.data, name)
    return [prompts.prompt(n).place for n in range(len(prompts))]


# ---- what is stored


def test_a_prompt_has_the_header_of_its_answer_and_nothing_that_is_trained(rendered: Render) -> None:
    row: dict[str, Any] = {"messages": [HI], "answer": {"words": ["ok"], "n": None}, "text_": "é"}
    found = rendered("rl", [{"prompt": "a b"}, row])
    prompts = PromptSet(found.data)
    first, second = prompts.prompt(0), prompts.prompt(1)
    assert (first.place, first.tokens.tolist(), first.text, first.messages) == (0, [*b"a b"], "a b", ())
    assert first.item == {"prompt": "a b"}
    assert (second.place, second.tokens.tolist(), second.text, second.messages) == (1, PROMPT, None, (HI,))
    assert second.item == row
    assert prompts.lengths.tolist() == [3, 21]
    assert [int(found.data.train.row(n).mask.sum()) for n in range(2)] == [0, 0]
    train = found.train
    assert (train.format, train.rows, train.tokens, train.trained_tokens) == ("prompts", 2, 24, 0)
    assert found.data.index["end_of_turn"] == [IM_END]


def test_messages_reach_graders_as_templates_see_them_and_the_item_as_it_was(rendered: Render) -> None:
    call = {"id": "c1", "type": "function", "function": {"name": "f", "arguments": '{"a": null}'}}
    messages = [
        {"role": "user", "content": [{"type": "text", "text": "hi"}]},
        {"role": "assistant", "content": "", "tool_calls": [call]},
        {"role": "tool", "tool_call_id": "c1", "content": "7"},
    ]
    found = PromptSet(rendered("rl", [{"messages": messages, "answer": 1}]).data).prompt(0)
    assert found.messages[0] == HI
    assert found.messages[1]["tool_calls"][0]["function"]["arguments"] == {"a": None}
    assert found.item["messages"] == messages


@pytest.mark.parametrize("prompt", ["p", "<|bos|>p"])
def test_b07_a_text_begins_with_one_bos_where_the_tokenizer_has_one(
    rendered: Render, tmp_path: Path, prompt: str
) -> None:
    model = make_tiny_model(tmp_path / "m")
    tokenizer = byte_tokenizer()
    tokenizer.post_processor = processors.TemplateProcessing(single="<|bos|> $A", special_tokens=[("<|bos|>", BOS)])
    tokenizer.save(str(model / "tokenizer.json"))
    prompts = PromptSet(rendered("rl", [{"prompt": prompt}, {"prompt": [HI]}], model=model).data)
    assert prompts.prompt(0).tokens.tolist() == [BOS, 112]
    assert prompts.prompt(1).tokens.tolist() == PROMPT


def test_items_are_read_by_place_whatever_is_in_them(rendered: Render) -> None:
    answers = ["line\nfeed", "\u2028", "", "é" * 100, "𝄞"]
    found = PromptSet(rendered("rl", [{"prompt": f"p{n}", "answer": a} for n, a in enumerate(answers)]).data)
    assert [found.prompt(n).item["answer"] for n in (4, 2, 0, 1, 3)] == [answers[n] for n in (4, 2, 0, 1, 3)]


def test_an_item_file_that_was_changed_is_refused(rendered: Render) -> None:
    found = rendered("rl", numbered(2))
    path = found.folder / "items-train.jsonl"
    path.write_bytes(path.read_bytes().replace(b'"answer": 2', b'"answer": 3'))
    with pytest.raises(WorkerError, match="prepared_data_changed"):
        prepared.load(found.folder)


# ---- what is held out, and what is left out


def test_the_last_prompts_are_held_out(rendered: Render) -> None:
    found = rendered("rl", numbered(7), held_out=3)
    assert places(found) == [0, 1, 2, 3]
    assert places(found, "validation") == [4, 5, 6]
    assert {name: report.rows for name, report in found.report.sets.items()} == {"train": 4, "validation": 3}
    assert found.report.warnings == ()


def test_with_a_file_of_their_own_the_first_of_it_are(rendered: Render) -> None:
    """Its places go on where those of the first file end. The first one is too long."""
    other = [{"prompt": "y" * 9}, *({"prompt": "y" * n} for n in (1, 2, 3))]
    found = rendered("rl", numbered(4), other=other, held_out=2, max_length=8)
    assert places(found) == [0, 1, 2, 3]
    assert places(found, "validation") == [5, 6]
    assert found.report.sets["validation"].dropped == {"too_long": 1}


def test_prompts_that_are_held_out_are_not_trained_on(rendered: Render) -> None:
    """The same ids count, whatever else the rows hold."""
    rows = [{"prompt": "a"}, {"prompt": "b", "answer": 1}, {"prompt": "b", "answer": 2}]
    found = rendered("rl", rows, held_out=1)
    assert (places(found), places(found, "validation")) == ([0], [2])
    assert (found.train.dropped, found.train.dropped_lines) == ({"in_held_out": 1}, (2,))
    assert found.warnings == {"prompt_held_out": [{"rows": 1, "lines": [2]}]}


def test_prompts_that_come_again_are_kept_and_warned_about(rendered: Render) -> None:
    found = rendered("rl", [{"prompt": text} for text in "abcabba"])
    assert places(found) == [0, 1, 2, 3, 4, 5, 6]
    assert found.warnings == {"prompt_repeated": [{"rows": 4, "lines": [4, 5, 6, 7]}]}


def test_long_prompts_are_left_out_and_never_cut(rendered: Render) -> None:
    found = rendered("rl", numbered(5), max_length=3)
    assert places(found) == [0, 1, 2]
    assert (found.train.dropped, found.train.dropped_lines) == ({"too_long": 2}, (4, 5))
    assert (found.train.longest, found.train.truncated_rows, found.train.tokens) == (5, 0, 6)


# ---- templates


STRIPS = CHAT_TEMPLATE.replace(
    "message['content']",
    "(message['content'].split('</think>')[-1] if message.role == 'assistant' and not loop.last"
    " else message['content'])",
)


def test_c14_a_template_that_rewrites_earlier_turns_is_named_with_the_message(rendered: Render, tmp_path: Path) -> None:
    """The prompt is what the model would see, so it is kept; its ids are those of the template."""
    model = make_tiny_model(tmp_path / "m")
    (model / "chat_template.jinja").write_text(STRIPS)
    thinking = {"role": "assistant", "content": "<think>r</think>a"}
    rows: list[Any] = [{"prompt": [HI]}, {"prompt": [HI, OK, HI, thinking, HI]}, {"prompt": [HI, OK, HI]}]
    found = rendered("rl", rows, model=model)
    assert found.warnings["prompt_rewritten"] == [{"rows": 1, "lines": [2], "message": 3}]
    tokens = PromptSet(found.data).prompt(1).tokens.tolist()
    turns = [PROMPT[:10], [*HEADER, *b"ok", IM_END, 10], PROMPT[:10], [*HEADER, *b"a", IM_END, 10], PROMPT]
    assert tokens == [id_ for turn in turns for id_ in turn]


def test_special_tokens_and_lost_tools_are_warned_about(rendered: Render) -> None:
    tool = {"type": "function", "function": {"name": "f"}}
    rows: list[Any] = [{"prompt": [HI], "tools": [tool]}, {"prompt": "a<|im_end|>"}]
    assert rendered("rl", rows).warnings == {
        "special_token_in_content": [{"rows": 1, "lines": [2], "tokens": {"<|im_end|>": 1}}],
        "tools_not_rendered": [{"rows": 1, "lines": [1]}],
    }


def test_a_template_that_refuses_a_prompt_names_the_line(rendered: Render, tmp_path: Path) -> None:
    model = make_tiny_model(tmp_path / "m")
    refuse = "{% if messages[0].role == 'system' %}{{ raise_exception('no system role') }}{% endif %}"
    (model / "chat_template.jinja").write_text(refuse + CHAT_TEMPLATE)
    rows = [{"prompt": [HI]}, {"prompt": [{"role": "system", "content": "s"}, HI]}]
    assert rendered("rl", rows, model=model).problems == [(2, "", "template_error")]


# ---- as a job


def job(make_job: MakeJob, rows: list[Any], environment: dict[str, Any] | None = None, **more: Any) -> FakeControlPlane:
    control = make_job(rows, method="rl", spec={"environment": environment or ENVIRONMENT}, **more)
    run.main(control.attempt(pb.ATTEMPT_KIND_PREPARE))
    return control


def test_a_job_is_quoted_by_what_it_may_sample(make_job: MakeJob) -> None:
    hyper: dict[str, Any] = {
        "steps": 5,
        "prompts_per_step": 2,
        "samples_per_prompt": 3,
        "max_new_tokens": 7,
        "eval_prompts": 1,
    }
    control = job(make_job, numbered(4), **hyper)
    assert control.prepared is not None, control.finished
    found = control.prepared
    assert (found.rows, found.tokens, found.trained_tokens) == (3, 1 + 2 + 3, 0)
    assert (found.total_steps, found.total_trained_tokens) == (5, 5 * 2 * 3 * 7)
    assert DataReport.model_validate_json(found.statistics_json).sets["validation"].rows == 1
    stored = prepared.load(control.store / found.prepared_prefix)
    assert [PromptSet(stored, name).prompt(0).item["answer"] for name in ("train", "validation")] == [1, 4]


@pytest.mark.parametrize(
    ("rows", "hyper", "words"),
    [
        (numbered(2), {"eval_prompts": 2}, ["the file has none for it", "2 prompts are to be held out"]),
        (numbered(3)[1:], {"max_prompt_tokens": 1}, ["2 too_long", "3 tokens", "max_prompt_tokens, 1"]),
    ],
)
def test_a_job_without_prompts_says_why(make_job: MakeJob, rows: list[Any], hyper: Any, words: list[str]) -> None:
    control = job(make_job, rows, **hyper)
    assert ended(control) == "no_trainable_tokens"
    assert control.finished is not None
    error = control.finished.error
    assert error is not None
    assert (error.code, error.param) == ("no_prompts", "environment.file")
    assert all(word in error.message for word in words), error.message


def test_rows_that_are_no_prompts_name_the_environments_file(make_job: MakeJob) -> None:
    control = job(make_job, [{"messages": [HI, OK]}])
    assert ended(control) == "invalid_data"
    assert control.finished is not None
    assert control.finished.error is not None
    assert (control.finished.error.code, control.finished.error.param) == ("wrong_task_format", "environment.file")


def test_a_grader_that_does_not_load_ends_the_job_before_an_accelerator_is_taken(make_job: MakeJob) -> None:
    broken = ENVIRONMENT | {"grader": {"type": "python", "source": "def grade(sample, item)\n    return 1.0\n"}}
    control = job(make_job, numbered(1), broken)
    assert control.prepared is None
    assert ended(control) in ("invalid_environment", "sandbox_unavailable")


@pytest.mark.slow
def test_prompts_that_the_environment_makes_are_rendered_as_uploaded_ones(make_job: MakeJob) -> None:
    pytest.importorskip("reasoning_gym")
    environment = {"type": "reasoning_gym", "task": "chain_sum", "seed": 3, "size": 4, "system_prompt": "s"}
    control = make_job(None, method="rl", spec={"environment": environment}, eval_prompts=2)
    run.main(control.attempt(pb.ATTEMPT_KIND_PREPARE))
    assert control.prepared is not None, control.finished
    data = prepared.load(control.store / control.prepared.prepared_prefix)
    train, held_out = PromptSet(data), PromptSet(data, "validation")
    assert [train.prompt(n).place for n in range(len(train))] == [0, 1, 2, 3]
    assert [held_out.prompt(n).place for n in range(len(held_out))] == [4, 5]
    first = train.prompt(0)
    assert [message["role"] for message in first.messages] == ["system", "user"]
    assert first.messages[1]["content"] == first.item["question"]
    assert first.tokens.tolist()[-len(HEADER) :] == HEADER
