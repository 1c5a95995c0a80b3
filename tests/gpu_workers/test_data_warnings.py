"""What can be trained and is probably not meant: a job says it, with counts and lines."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from tokenizers import AddedToken, Tokenizer, models, pre_tokenizers

from finery.types.data import Warning as DataWarning
from finery.types.methods import TrainOn
from finery_gpu_workers.data.tokens import RowTokenizer, add_tokens
from finery_gpu_workers.data.turns import Rendered
from finery_testing.templates import SPECIAL
from finery_testing.tiny import BOS, CHAT_TEMPLATE, EOS, byte_tokenizer

from .conftest import MakeJob
from .samples import HI, HI_OK, OK, one, rendered, template, text_of, tokenised, trained
from .test_data_cases import prepare, with_template
from .test_data_preview import previewed
from .test_data_styles import STYLES, conversations

TOOL = {"role": "tool", "tool_call_id": "a", "content": 'it is "sunny"'}
CALLS = (
    "{% for m in messages %}{{ '<|im_start|>' + m.role + '\n' + m.content }}"
    "{% for c in m.tool_calls or [] %}{{ c.function.name + ' ' + c.function.arguments|tojson }}{% endfor %}"
    "{{ '<|im_end|>\n' }}{% endfor %}"
    "{% if add_generation_prompt %}{{ '<|im_start|>assistant\n' }}{% endif %}"
)


def call(id_: str, **arguments: Any) -> dict[str, Any]:
    return {"id": id_, "type": "function", "function": {"name": "f", "arguments": arguments}}


def calling(content: str | None, *calls: dict[str, Any]) -> list[dict[str, Any]]:
    return [HI, {"role": "assistant", "content": content, "tool_calls": list(calls)}]


def missing(messages: list[dict[str, Any]], source: str) -> set[str]:
    samples = rendered(messages, source)
    return {code for sample in samples if isinstance(sample, Rendered) for code in sample.missing}


def warned(warnings: tuple[DataWarning, ...], code: str) -> dict[str, Any]:
    (found,) = [warning for warning in warnings if warning.code == code]
    (detail,) = found.details or []
    return detail


# ---- special tokens in texts


def test_an_end_of_turn_inside_an_answer_does_not_cut_its_mask() -> None:
    messages = [
        HI,
        {"role": "assistant", "content": "a<|im_end|>b"},
        HI,
        {"role": "assistant", "content": "ok<|im_end|>"},
    ]
    assert text_of(one(messages)) == "a$b$ok$$"


def test_special_tokens_in_texts_are_named_with_their_lines(make_job: MakeJob) -> None:
    rows = [
        {"messages": HI_OK},
        {"messages": [HI, {"role": "assistant", "content": "a<|im_end|>b"}]},
        {"messages": [{"role": "user", "content": "<|eos|>"}, {"role": "assistant", "content": "<|im_end|><|eos|>"}]},
    ]
    _, report = prepare(make_job(rows))
    expected = {"rows": 2, "lines": [2, 3], "tokens": {"<|im_end|>": 2, "<|eos|>": 1}}
    assert warned(report.warnings, "special_token_in_content") == expected


def test_special_tokens_inside_arguments_are_found(make_job: MakeJob, tmp_path: Path) -> None:
    model = with_template(tmp_path / "model", CALLS)
    _, report = prepare(make_job([{"messages": calling(None, call("a", x="<|pad|>"))}], model=model))
    assert warned(report.warnings, "special_token_in_content")["tokens"] == {"<|pad|>": 1}


def test_ends_that_a_text_has_already_are_not_doubled(make_job: MakeJob) -> None:
    tokenizer = RowTokenizer(byte_tokenizer(), [EOS])
    tokenizer.begin = [BOS]
    for text in ("ab", "<|bos|>ab", "ab<|eos|>", "<|bos|>ab<|eos|>"):
        assert one({"text": text}, tokenizer=tokenizer).tokens.tolist() == [BOS, *b"ab", EOS]
    row = one({"prompt": "<|bos|>ab", "completion": "c<|eos|>"}, tokenizer=tokenizer)
    assert row.tokens.tolist() == [BOS, *b"abc", EOS]
    assert trained(row) == [3, 4]
    _, report = prepare(make_job([{"text": "ab<|eos|>"}, {"text": "cd"}]))
    assert report.warnings == ()
    _, report = prepare(make_job([{"text": "a<|eos|>b<|eos|>"}]))
    assert warned(report.warnings, "special_token_in_content")["tokens"] == {"<|eos|>": 1}


def test_a_preview_of_a_text_with_its_own_end_has_a_text_for_each_token(make_job: MakeJob) -> None:
    (row,) = previewed(make_job, [{"text": "ab<|eos|>"}])
    assert [token.text for token in row.tokens] == ["a", "b", "<|eos|>"]


def test_an_end_of_turn_that_is_not_special_ends_the_turn() -> None:
    """The end token as an added token that decoding does not hide."""
    tokenizer = Tokenizer(byte_tokenizer().model)
    tokenizer.pre_tokenizer = byte_tokenizer().pre_tokenizer
    tokenizer.add_tokens([AddedToken(f"<|{name}|>", normalized=False) for name in ("bos", "eos", "pad", "im_start")])
    tokenizer.add_tokens([AddedToken("<|im_end|>", normalized=False)])
    rows = RowTokenizer(tokenizer, [260])
    assert trained(one(HI_OK, tokenizer=rows)) == [21, 22, 23]
    assert rows.end_of_turn == {260}


# ---- characters without a token


def test_characters_without_a_token_are_named_with_their_lines() -> None:
    vocab = [("<unk>", 0.0), ("\u2581", -3.0), *((chr(code), -5.0) for code in range(33, 127))]
    unigram = Tokenizer(models.Unigram(vocab, unk_id=0))
    unigram.pre_tokenizer = pre_tokenizers.Metaspace()
    unigram.add_special_tokens(["<|im_start|>", "<|im_end|>", "<|eos|>"])
    rows = RowTokenizer(unigram, [unigram.get_vocab()["<|eos|>"]])
    assert rows.unknown == 0
    found = [tokenised({"text": text}, tokenizer=rows)[0].notes for text in ("plain", "caf\u00e9", "\U0001f600")]
    assert found == [set(), {"unknown_characters"}, {"unknown_characters"}]
    assert RowTokenizer(byte_tokenizer()).unknown is None


# ---- turns without an end


@pytest.mark.parametrize("train_on", ["assistant", "last", "all"])
@pytest.mark.parametrize(
    "source",
    [
        # the end of a turn is written by the turn that follows
        "{% for m in messages %}{% if not loop.first %}{{ '<|im_end|>\\n' }}{% endif %}"
        "{{ '<|im_start|>' + m.role + '\\n' + m.content }}{% endfor %}"
        "{% if add_generation_prompt %}{{ '<|im_end|>\\n<|im_start|>assistant\\n' }}{% endif %}",
        "{% for m in messages %}{{ m.role + ': ' + m.content + '\\n' }}{% endfor %}"
        "{% if add_generation_prompt %}{{ 'assistant: ' }}{% endif %}",
    ],
)
def test_turns_that_no_token_ends_are_noticed(source: str, train_on: TrainOn) -> None:
    assert one([*HI_OK, *HI_OK], source, train_on).notes == {"end_of_turn_not_rendered"}
    assert one([*HI_OK, *HI_OK], CHAT_TEMPLATE, train_on).notes == set()


# ---- what the template leaves out


@pytest.mark.parametrize(
    ("source", "messages", "expected"),
    [
        (CALLS, [*calling("let me see", call("a", x=1)), TOOL, OK], set()),
        # as in Llama 3.1, which writes what tools say as JSON text
        (CALLS.replace("m.content }}", "m.content|tojson }}"), [*calling(None, call("a")), TOOL, OK], set()),
        # no branch for the role
        (CALLS.replace("messages %}", "messages if m.role != 'tool' %}"), [*calling(None, call("a")), TOOL, OK],
         {"content_not_rendered"}),
        # as in Llama 3.1: what is said next to a call is not written
        (CALLS.replace("m.content }}", "('' if m.tool_calls else m.content) }}"), calling("let me see", call("a")),
         {"content_not_rendered"}),
        # only the first of parallel calls
        (CALLS.replace("m.tool_calls or []", "(m.tool_calls or [])[:1]"), calling(None, call("a", x=1), call("b", x=2)),
         {"tools_not_rendered"}),
        # written, but not as JSON; and not written at all
        (CALLS.replace("|tojson", ".x|string"), calling(None, call("a", x=1), call("b", x=2)), set()),
        (CALLS.replace("c.function.arguments|tojson", "'()'"), calling(None, call("a", x=1)), {"tools_not_rendered"}),
    ],
)  # fmt: skip
def test_what_a_template_leaves_out_is_noticed(source: str, messages: list[dict[str, Any]], expected: set[str]) -> None:
    assert missing(messages, source) == expected


@pytest.mark.parametrize("style", STYLES)
def test_nothing_is_reported_where_everything_is_written(style: str) -> None:
    shared = template(STYLES[style][0])
    tokenizer = byte_tokenizer()
    add_tokens(tokenizer, SPECIAL)

    @given(conversations(style), st.booleans())
    def over_random_conversations(conversation: tuple[list[dict[str, Any]], list[Any] | None], last: bool) -> None:
        messages, tools = conversation
        row = {"messages": messages} | ({"tools": tools} if tools else {})
        samples = rendered(row, shared, "last" if last else "assistant")
        assert not any(sample.missing for sample in samples if isinstance(sample, Rendered))

    over_random_conversations()


# ---- validation


def test_validation_rows_that_are_trained_on_are_counted(make_job: MakeJob) -> None:
    other = {"messages": [HI, {"role": "assistant", "content": "no"}]}
    rows = [{"messages": HI_OK}, {"messages": [*HI_OK, *HI_OK]}]
    _, report = prepare(make_job(rows, validation=[other, rows[1], rows[1]]))
    assert warned(report.warnings, "validation_overlap") == {"rows": 2, "lines": [2, 3]}
    _, report = prepare(make_job(rows, validation=[other]))
    assert report.warnings == ()
