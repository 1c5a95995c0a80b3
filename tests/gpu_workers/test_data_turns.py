"""Tool calls, reasoning, and rows that are trained turn by turn."""

from __future__ import annotations

import json
from typing import Any

import pytest

from finery_gpu_workers.data import turns
from finery_gpu_workers.data.chat import RowError
from finery_gpu_workers.data.tokens import RowTokenizer, add_tokens
from finery_gpu_workers.data.turns import Rendered
from finery_testing.templates import OPENS_REASONING, QWEN3, STRIPS_REASONING
from finery_testing.tiny import CHAT_TEMPLATE, IM_END, IM_START, byte_tokenizer

from .samples import HI, HI_OK, OK, one, rendered, template, text_of, tokenised, whole

THINKING = {"role": "assistant", "content": "<think>r</think>a"}


def call(arguments: Any, name: str = "f") -> dict[str, Any]:
    return {"id": "c1", "type": "function", "function": {"name": name, "arguments": arguments}}


def asked(arguments: Any = "{}", **asking: Any) -> list[dict[str, Any]]:
    """A07's row."""
    return [
        HI,
        {"role": "assistant", "content": None, "tool_calls": [call(arguments)]} | asking,
        {"role": "tool", "tool_call_id": "c1", "content": "42"},
        {"role": "assistant", "content": "done"},
    ]


# ---- tools


def test_a07_a_call_without_content_is_trained_and_the_tools_answer_is_not() -> None:
    first, last = tokenised(asked(), QWEN3)
    assert text_of(first) == '<think>\n\n</think>\n\n<tool_call>\n{"name": "f", "arguments": {}}\n</tool_call>$'
    assert text_of(last) == "<think>\n\n</think>\n\ndone$"
    for row in (first, last):
        assert "None" not in whole(row)
        assert "null" not in whole(row)
    # user, call, tool (a user turn to this template), answer: four headers for four messages
    assert int((last.tokens == IM_START).sum()) == 4
    assert "<tool_response>\n42\n</tool_response>" in whole(last)


def test_a07_with_a_template_that_only_appends_the_row_is_one_sample() -> None:
    source = CHAT_TEMPLATE.replace(
        "message['content'] +",
        "message['content'] + ('<call>' + message['tool_calls'][0].function.arguments | tojson + '</call>' "
        "if message['tool_calls'] else '') +",
    )
    assert text_of(one(asked('{"a":null}'), source)) == '<call>{"a": null}</call>$done$'


@pytest.mark.parametrize("close", ["</tool_call>", "<|bos|>"])
def test_special_tokens_between_a_call_and_the_end_of_turn_do_not_end_the_turn(close: str) -> None:
    """The tags of calls are special tokens in some tokenizers; the end of turn is known from the configuration."""
    tokenizer = byte_tokenizer()
    add_tokens(tokenizer, ["<tool_call>", "</tool_call>"])
    source = QWEN3.replace("</tool_call>", close).replace("<|im_end|>\\n", "<|im_end|><|eos|>\\n")
    rows = RowTokenizer(tokenizer, [IM_END])
    messages = asked({"x": "x"}, reasoning_content="r")
    row = one(messages, source, tokenizer=rows)
    called = '#\n{"name": "f", "arguments": {"x": "x"}}\n#$'
    assert text_of(row) == f"<think>\nr\n</think>\n\n{called}<think>\n\n</think>\n\ndone$"
    assert rows.end_of_turn == {IM_END}


def test_a04_a_key_keeps_the_type_it_has_in_its_row() -> None:
    texts = [whole(tokenised(asked(arguments), QWEN3)[0]) for arguments in ({"at": "2026-01-02"}, {"at": 1767312000})]
    assert '{"at": "2026-01-02"}' in texts[0]
    assert '{"at": 1767312000}' in texts[1]


def test_a05_rows_show_their_own_keys_only_and_a_null_stays_null() -> None:
    tools = [{"type": "function", "function": {"name": "f", "parameters": {"zip": {"default": None}}}}]
    row = {"messages": asked({"zip": "0150", "n": None, "m": 1}), "tools": tools}
    for sample in tokenised(row, QWEN3):
        text = whole(sample)
        assert '"arguments": {"zip": "0150", "n": null, "m": 1}}' in text
        assert f"<tools>\n{json.dumps(tools[0])}\n</tools>" in text


def codes(row: dict[str, Any] | list[dict[str, Any]], source: str) -> set[str]:
    return {code for sample in rendered(row, source) if isinstance(sample, Rendered) for code in sample.missing}


def test_a_template_that_leaves_something_out_is_noticed() -> None:
    tools = [{"type": "function", "function": {"name": "f", "parameters": {}}}]
    no_system = "{% if m.role == 'system' %}{% continue %}{% endif %}"
    loop = "{% for m in messages %}" + no_system + "{{ '<|im_start|>' + m.role + '\n' + m.content + '<|im_end|>' }}"
    deaf = loop + "{% endfor %}{% if add_generation_prompt %}{{ '<|im_start|>assistant\n' }}{% endif %}"
    assert codes({"messages": asked(), "tools": tools}, CHAT_TEMPLATE) == {"tools_not_rendered"}
    assert codes({"messages": HI_OK, "tools": tools}, CHAT_TEMPLATE) == {"tools_not_rendered"}
    assert codes([{"role": "system", "content": "Be brief."}, *HI_OK], deaf) == {"system_not_rendered"}
    assert codes([{"role": "system", "content": "Be brief."}, *HI_OK], CHAT_TEMPLATE) == set()
    assert codes({"messages": [{"role": "system", "content": "s"}, *asked()], "tools": tools}, QWEN3) == set()


def test_a_row_of_very_many_turns_is_refused_and_not_rendered_for_hours(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(turns, "MAX_RENDERED_MESSAGES", 7)
    assert len(tokenised(HI_OK)) == 1
    with pytest.raises(RowError, match="2 turns to train in a row of 4 messages") as error:
        tokenised([*HI_OK, *HI_OK])
    assert error.value.code == "too_many_messages"
    assert len(tokenised([*HI_OK, *HI_OK], CHAT_TEMPLATE, "last")) == 1


# ---- reasoning


def test_a14_each_turn_is_trained_once_with_its_reasoning() -> None:
    rows = tokenised([HI, THINKING, HI, THINKING], STRIPS_REASONING)
    assert [text_of(row) for row in rows] == ["<think>r</think>a$"] * 2
    assert [whole(row).count("<think>") for row in rows] == [1, 1]
    # two spans of 1 reasoning byte plus its two tags, 7 and 8 bytes
    assert [row.reasoning_tokens for row in rows] == [16, 16]
    assert [row.reasoning_trained for row in rows] == [16, 16]


def test_a14_training_on_the_last_turn_only_needs_no_unrolling() -> None:
    row = one([HI, THINKING, HI, THINKING], STRIPS_REASONING, "last")
    assert text_of(row) == "<think>r</think>a$"
    assert (row.reasoning_tokens, row.reasoning_trained) == (16, 16)


def test_a14_training_on_everything_is_refused_where_the_template_strips() -> None:
    with pytest.raises(RowError) as error:
        tokenised([HI, THINKING, HI, THINKING], STRIPS_REASONING, "all")
    assert (error.value.code, error.value.path) == ("prompt_not_prefix", "messages[1]")
    assert "turn by turn" in error.value.hint
    (row,) = tokenised([HI, THINKING, HI, THINKING], CHAT_TEMPLATE, "all")
    assert (row.reasoning_tokens, row.reasoning_trained) == (32, 32)


def test_a14_reasoning_that_the_template_never_writes_is_counted_as_lost() -> None:
    always = STRIPS_REASONING.replace("loop.index0 < ns.last and ", "")
    row = one([HI, THINKING, HI, THINKING | {"weight": 0}], always)
    assert text_of(row) == "a$"
    assert (row.reasoning_tokens, row.reasoning_trained) == (16, 0)
    apart = one([HI, OK | {"reasoning_content": "éy"}], CHAT_TEMPLATE)
    assert text_of(apart) == "ok$"
    assert (apart.reasoning_tokens, apart.reasoning_trained) == (3, 0)


def test_reasoning_of_its_own_key_is_trained_as_the_template_writes_it() -> None:
    row = one([HI, OK | {"reasoning_content": "ok"}], QWEN3)
    assert text_of(row) == "<think>\nok\n</think>\n\nok$"
    assert (row.reasoning_tokens, row.reasoning_trained) == (len("<think>\nok\n</think>"),) * 2


@pytest.mark.parametrize("written", ["m.thinking", "m['reasoning']", "m.reasoning_content", "m.get('thinking')"])
@pytest.mark.parametrize("given", ["thinking", "reasoning", "reasoning_content"])
def test_reasoning_reaches_the_template_under_its_own_name(written: str, given: str) -> None:
    source = CHAT_TEMPLATE.replace("message['content'] +", f"({written} or '') + message['content'] +")
    source = source.replace("m.", "message.").replace("m[", "message[")
    assert text_of(one([HI, {"role": "assistant", given: "why", "content": "ok"}], source)) == "whyok$"


def test_words_of_the_reasoning_in_the_answer_are_not_taken_for_it() -> None:
    always = STRIPS_REASONING.replace("loop.index0 < ns.last and ", "")
    row = one([HI, {"role": "assistant", "content": "<think>ok</think>ok ok"}], always)
    assert text_of(row) == "ok ok$"
    assert (row.reasoning_tokens, row.reasoning_trained) == (len("<think>ok</think>"), 0)


@pytest.mark.parametrize("content", ["r\n</think>\n\na", "<think>\nr\n</think>\n\na"])
def test_a15_the_rendered_row_is_what_was_sampled(content: str) -> None:
    row = one([HI, {"role": "assistant", "content": content}], OPENS_REASONING)
    prompt = template(OPENS_REASONING).render([HI], prompt=True)
    sampled = byte_tokenizer().encode(prompt + "r\n</think>\n\na<|im_end|>").ids
    assert row.tokens.tolist() == [*sampled, 10]
    assert text_of(row) == "r\n</think>\n\na$"
    text = whole(row)
    assert (text.count("<think>"), text.count("</think>")) == (1, 1)
    # The opening tag belongs to the generation prompt: it is not trained, so it is not missed either.
    assert (row.reasoning_tokens, row.reasoning_trained) == (len("r\n</think>"),) * 2


def test_a15_a_template_that_writes_it_otherwise_is_refused() -> None:
    """An empty block, and the reasoning outside of it."""
    careless = OPENS_REASONING.replace("{%- if '</think>' in content %}", "{%- if '<think>' in content %}")
    with pytest.raises(RowError) as error:
        tokenised([HI, {"role": "assistant", "content": "r\n</think>\n\na"}], careless)
    assert error.value.code == "reasoning_not_as_sampled"
    assert error.value.path == "messages[1].content"


def test_a15_a_row_without_the_reasoning_that_the_prompt_opens_is_refused_with_a_hint() -> None:
    source = CHAT_TEMPLATE.replace("assistant\\n' }}{%- endif", "assistant\\n<think>\\n' }}{%- endif")
    with pytest.raises(RowError) as error:
        tokenised(HI_OK, source)
    assert error.value.code == "prompt_not_prefix"
    assert "reasoning_content" in error.value.hint


def test_completions_as_messages_train_every_answer_behind_the_prompt() -> None:
    row = {"prompt": [*HI_OK, HI], "completion": [{"role": "assistant", "content": "no"}]}
    found = one(row)
    assert text_of(found) == "no$"
    assert len(found.tokens) == 50
    for train_on in ("last", "completion"):
        assert text_of(one(row, CHAT_TEMPLATE, train_on)) == "no$"
    assert int(one(row, CHAT_TEMPLATE, "all").mask.sum()) == 49


def test_a30_text_parts_are_the_text() -> None:
    parts = [{"type": "text", "text": "h"}, {"type": "text", "text": "i"}]
    assert one([HI | {"content": parts}, OK]).tokens.tolist() == one(HI_OK).tokens.tolist()
    assert one([HI, OK | {"content": []}]).tokens.tolist() == one([HI, OK | {"content": ""}]).tokens.tolist()
