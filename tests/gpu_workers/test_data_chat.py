"""Rows, templates, masks. Positions are those of F-CHAT (../shared/cases/fixtures.md), counted by hand."""

from __future__ import annotations

import json
from datetime import UTC, datetime
from typing import Any

import numpy as np
import pytest
from tokenizers import Tokenizer, models, pre_tokenizers

from finery.types.methods import TrainOn
from finery_gpu_workers.data.chat import Row, RowError, Template, parse_row, render_row
from finery_gpu_workers.data.tokens import RowTokenizer, TokenRow
from finery_testing.tiny import BOS, CHAT_TEMPLATE, EOS, IM_END, IM_START, byte_tokenizer

NOW = datetime(2026, 11, 30, tzinfo=UTC)
HI_OK = [{"role": "user", "content": "hi"}, {"role": "assistant", "content": "ok"}]
# SmolLM2's: a system message of its own where the row has none.
DEFAULT_SYSTEM = (
    "{% for message in messages %}{% if loop.first and messages[0]['role'] != 'system' %}"
    "{{ '<|im_start|>system\nYou are helpful<|im_end|>\n' }}{% endif %}"
    "{{ '<|im_start|>' + message['role'] + '\n' + message['content'] + '<|im_end|>' + '\n' }}{% endfor %}"
    "{% if add_generation_prompt %}{{ '<|im_start|>assistant\n' }}{% endif %}"
)


def template(source: str = CHAT_TEMPLATE) -> Template:
    return Template(source, {"bos_token": "<|bos|>", "eos_token": "<|eos|>"}, NOW)


def tokenised(
    messages: list[dict[str, str]],
    source: str = CHAT_TEMPLATE,
    train_on: TrainOn = "assistant",
    tokenizer: Tokenizer | None = None,
    untrained: frozenset[int] = frozenset(),
) -> TokenRow:
    rendered = render_row(template(source), Row(messages, untrained), train_on)
    (row,) = RowTokenizer(tokenizer or byte_tokenizer()).rows([rendered])
    if isinstance(row, RowError):
        raise row
    return row


def trained(row: TokenRow) -> list[int]:
    return [int(n) for n in np.flatnonzero(row.mask)]


def text_of(row: TokenRow) -> str:
    """What is trained, with the end-of-turn token as `$`."""
    ids = [int(n) for n in row.tokens[row.mask == 1]]
    return "".join("$" if n == IM_END else chr(n) for n in ids)


# ---- masks


def test_f_chat_trains_the_answer_and_its_end_of_turn() -> None:
    row = tokenised(HI_OK)
    assert len(row.tokens) == 25
    assert trained(row) == [21, 22, 23]
    assert row.tokens[21:24].tolist() == [ord("o"), ord("k"), IM_END]
    assert row.tokens.dtype == np.int32


def test_every_assistant_turn_is_trained_or_only_the_last() -> None:
    messages = [*HI_OK, {"role": "user", "content": "hi"}, {"role": "assistant", "content": "no"}]
    assert trained(tokenised(messages)) == [21, 22, 23, 46, 47, 48]
    assert trained(tokenised(messages, train_on="last")) == [46, 47, 48]


def test_train_on_all_trains_every_token_but_the_first() -> None:
    assert trained(tokenised(HI_OK, train_on="all")) == list(range(1, 25))


def test_a08_a_turn_of_weight_0_is_not_trained() -> None:
    messages = [HI_OK[0], HI_OK[1] | {"weight": 0}, HI_OK[0], HI_OK[1] | {"weight": 1}]
    row = parse_row(json.dumps({"messages": messages}).encode())
    assert row.messages == [*HI_OK, *HI_OK]
    found = tokenised(row.messages, untrained=row.untrained)
    assert len(found.tokens) == 50
    assert trained(found) == [46, 47, 48]
    everything = tokenised(row.messages, untrained=row.untrained, train_on="all")
    assert trained(everything) == [*range(1, 21), *range(24, 50)]
    assert trained(tokenised(HI_OK, untrained=frozenset({1}))) == []
    assert trained(tokenised(HI_OK, untrained=frozenset({1}), train_on="last")) == []


def test_a13_prompt_length_is_that_of_the_prompt_rendered_alone() -> None:
    rendered = render_row(template(), Row(HI_OK), "assistant")
    prompt = byte_tokenizer().encode(rendered.text[: rendered.turns[0].start]).ids
    assert len(prompt) == 21
    assert tokenised(HI_OK).tokens[:21].tolist() == prompt


@pytest.mark.parametrize(
    "source",
    [
        # the generation prompt says something that the conversation does not
        CHAT_TEMPLATE.replace("assistant\\n' }}{%- endif", "assistant\\nSure: ' }}{%- endif"),
        # an earlier turn changes when a later one comes
        "{% for m in messages %}{{ '<|im_start|>' + m.role + '\n' + (m.content if loop.last else '') + '<|im_end|>' }}"
        "{% endfor %}{% if add_generation_prompt %}{{ '<|im_start|>assistant\n' }}{% endif %}",
        # nothing follows the prompt
        "{{ '<|im_start|>assistant\n' }}",
    ],
)
def test_a13_a_prompt_that_is_no_strict_prefix_rejects_the_row(source: str) -> None:
    with pytest.raises(RowError) as error:
        tokenised(HI_OK, source)
    assert error.value.code == "prompt_not_prefix"
    assert error.value.path == "messages[1]"


def test_a13_a_token_across_the_end_of_the_prompt_rejects_the_row() -> None:
    """The prompt alone ends in `\\n`; inside the row the two new lines are one token."""
    base = byte_tokenizer()
    vocab = json.loads(base.to_str())["model"]["vocab"]
    merged = Tokenizer(models.BPE(vocab=vocab | {"ĊĊ": 261}, merges=[("Ċ", "Ċ")]))
    merged.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    merged.add_special_tokens(["<|im_start|>", "<|im_end|>"])
    messages = [HI_OK[0], {"role": "assistant", "content": "\nok"}]
    assert 261 in Tokenizer.encode(merged, "a\n\nb").ids
    with pytest.raises(RowError) as error:
        tokenised(messages, tokenizer=merged)
    assert error.value.code == "prompt_not_prefix"
    tokenised(HI_OK, tokenizer=merged)


def test_a13_a_prompt_that_tokenises_otherwise_inside_the_row_rejects_the_row() -> None:
    """GPT-2's pattern: two blanks at the end of the prompt are one token, before a word they are two."""
    base = byte_tokenizer()
    vocab = json.loads(base.to_str())["model"]["vocab"]
    tokenizer = Tokenizer(models.BPE(vocab=vocab | {"ĠĠ": 261}, merges=[("Ġ", "Ġ")]))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=True)
    tokenizer.add_special_tokens(["<|im_start|>", "<|im_end|>"])
    source = CHAT_TEMPLATE.replace("['role'] + '\\n'", "['role'] + ':  '").replace("assistant\\n'", "assistant:  '")
    assert len(tokenizer.encode(":  ").ids) < len(tokenizer.encode(":  ok").ids) - 2
    with pytest.raises(RowError, match="strict prefix"):
        tokenised(HI_OK, source, tokenizer=tokenizer)


def test_a16_tokens_of_the_generation_prompt_are_never_trained() -> None:
    source = (
        "{% for m in messages %}{{ '<|im_start|>' + m.role + '\n' }}"
        "{% if m.role == 'assistant' %}<think></think>{% endif %}{{ m.content + '<|im_end|>\n' }}{% endfor %}"
        "{% if add_generation_prompt %}{{ '<|im_start|>assistant\n<think></think>' }}{% endif %}"
    )
    row = tokenised(HI_OK, source)
    assert text_of(row) == "ok$"
    assert len(trained(row)) == 3


@pytest.mark.parametrize("system", [None, "Be brief."])
def test_a_default_system_message_keeps_the_prompt_a_prefix(system: str | None) -> None:
    messages = [*([{"role": "system", "content": system}] if system else []), *HI_OK, *HI_OK]
    assert text_of(tokenised(messages, DEFAULT_SYSTEM)) == "ok$ok$"


def test_characters_of_several_bytes_keep_their_place() -> None:
    messages = [{"role": "user", "content": "a\U0001f600"}, {"role": "assistant", "content": "é\U0001f600"}]
    row = tokenised(messages)
    assert bytes(int(n) for n in row.tokens[row.mask == 1] if n < 256) == "é\U0001f600".encode()
    assert row.tokens[np.flatnonzero(row.mask)[-1]] == IM_END


def test_an_answer_that_is_empty_trains_its_end_only() -> None:
    assert text_of(tokenised([HI_OK[0], {"role": "assistant", "content": ""}])) == "$"


def test_without_an_end_of_turn_token_the_whole_rendered_turn_is_trained() -> None:
    source = (
        "{% for m in messages %}{{ m.role + ': ' + m.content + '\n' }}{% endfor %}"
        "{% if add_generation_prompt %}{{ 'assistant: ' }}{% endif %}"
    )
    assert text_of(tokenised(HI_OK, source)) == "ok\n"


def test_end_of_turn_ids_come_from_the_data() -> None:
    source = CHAT_TEMPLATE.replace("<|im_end|>", "<|eos|>")
    tokenizer = RowTokenizer(byte_tokenizer())
    tokenizer.rows([render_row(template(source), Row(HI_OK), "assistant")])
    assert tokenizer.end_of_turn == {EOS}


@pytest.mark.parametrize(("content", "text"), [("a", "a"), ("final", "final"), (" ax ", "ax"), ("x", "x"), ("", "")])
def test_special_tokens_that_the_template_writes_before_the_content_do_not_end_the_turn(
    content: str, text: str
) -> None:
    """As in gpt-oss: a channel, whose name may hold the content, comes between the prompt and the content."""
    source = (
        "{% for m in messages %}{{ '<|im_start|>' + m.role }}"
        "{% if m.role == 'assistant' %}{{ '<|bos|>final<|eos|>' + m.content.strip() + '<|im_end|>\n' }}"
        "{% else %}{{ '\n' + m.content + '<|im_end|>\n' }}{% endif %}{% endfor %}"
        "{% if add_generation_prompt %}{{ '<|im_start|>assistant' }}{% endif %}"
    )
    messages = [HI_OK[0], {"role": "assistant", "content": content}]
    rendered = [render_row(template(source), Row([*messages, *messages]), "assistant")]
    tokenizer = RowTokenizer(byte_tokenizer())
    (row,) = tokenizer.rows(rendered)
    assert isinstance(row, TokenRow)
    turn = [BOS, *b"final", EOS, *text.encode(), IM_END]
    assert row.tokens[row.mask == 1].tolist() == [*turn, *turn]
    assert tokenizer.end_of_turn == {IM_END}


def test_a_template_that_changes_the_content_is_not_asked_more_and_more() -> None:
    upper = template(CHAT_TEMPLATE.replace("message['content']", "message['content'].upper()"))
    for n in range(5):
        messages = [HI_OK[0], {"role": "assistant", "content": f"answer {n} <|eos|>"}]
        (row,) = RowTokenizer(byte_tokenizer()).rows([render_row(upper, Row(messages), "assistant")])
        assert isinstance(row, TokenRow)
        assert text_of(row) == f"ANSWER {n} <|EOS|>$"
    assert upper.endings == ["<|im_end|>\n"]


def test_the_tokenizer_adds_no_token_of_its_own() -> None:
    assert tokenised(HI_OK).tokens[0] == IM_START


# ---- rows


def line(*roles: str, **extra: Any) -> bytes:
    return json.dumps({"messages": [{"role": role, "content": "x"} for role in roles], **extra}).encode()


@pytest.mark.parametrize(
    ("content", "code"),
    [
        (b"[]", "not_an_object"),
        (b'"x"', "not_an_object"),
        (b"{}", "missing_messages"),
        (b'{"messages":"hi"}', "wrong_type"),
        (b'{"messages":[7]}', "wrong_type"),
        (b'{"messages":[{"role":"user"}]}', "wrong_type"),
        (b'{"messages":[],"messages":[]}', "duplicate_key"),
        (b'{"messages":[],"score":NaN}', "invalid_json"),
        (b'{"messages":[', "invalid_json"),
        (b"\xff", "invalid_utf8"),
        (
            b'{"messages":[{"role":"user","content":"a\\ud83d b"},{"role":"assistant","content":"b"}]}',
            "invalid_unicode",
        ),
        (line("user", "assistant", "user", "user"), "last_message_not_assistant"),
        (b'{"messages":[]}', "last_message_not_assistant"),
        (line("system", "system", "user", "assistant"), "role_order"),
        (line("user", "system", "assistant"), "role_order"),
        (line("assistant"), "no_user_message"),
        (line("human", "assistant"), "unknown_role"),
        (b'{"messages":[{"role":"user","content":"a","name":"b"}]}', "unknown_field"),
        (b'{"messages":[{"role":"user","content":"a","weight":1}]}', "invalid_weight"),
        (b'{"messages":[{"role":"assistant","content":"a","weight":0.5}]}', "invalid_weight"),
        (b'{"messages":[{"role":"assistant","content":"a","weight":true}]}', "invalid_weight"),
        (b'{"messages":[{"role":"assistant","content":"a","weight":-1}]}', "invalid_weight"),
    ],
)
def test_a31_rows_that_cannot_be_trained_on_get_a_code(content: bytes, code: str) -> None:
    with pytest.raises(RowError) as error:
        parse_row(content)
    assert error.value.code == code


def test_good_rows_keep_every_character() -> None:
    content = json.dumps({"messages": [{"role": "user", "content": " a\u0000\n"}, HI_OK[1]], "id": 7}).encode()
    assert parse_row(content) == Row([{"role": "user", "content": " a\u0000\n"}, HI_OK[1]])


def test_a31_what_the_template_refuses_is_a_problem_of_the_row() -> None:
    source = "{% if messages[0].role == 'system' %}{{ raise_exception('no system role') }}{% endif %}" + CHAT_TEMPLATE
    with pytest.raises(RowError, match="no system role") as error:
        template(source).render([{"role": "system", "content": "x"}, *HI_OK])
    assert error.value.code == "template_error"
    assert template(source).render(HI_OK)
