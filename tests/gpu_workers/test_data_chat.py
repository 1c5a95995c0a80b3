"""Masks of chat rows. Positions are those of F-CHAT (../shared/cases/fixtures.md), counted by hand."""

from __future__ import annotations

import json

import numpy as np
import pytest
from tokenizers import Tokenizer, models, pre_tokenizers

from finery_gpu_workers.data.chat import RowError
from finery_gpu_workers.data.tokens import RowTokenizer
from finery_gpu_workers.data.turns import Rendered
from finery_testing.tiny import BOS, CHAT_TEMPLATE, EOS, IM_END, IM_START, byte_tokenizer

from .samples import HI_OK, one, rendered, template, text_of, trained

# SmolLM2's: a system message of its own where the row has none.
DEFAULT_SYSTEM = (
    "{% for message in messages %}{% if loop.first and messages[0]['role'] != 'system' %}"
    "{{ '<|im_start|>system\nYou are helpful<|im_end|>\n' }}{% endif %}"
    "{{ '<|im_start|>' + message['role'] + '\n' + message['content'] + '<|im_end|>' + '\n' }}{% endfor %}"
    "{% if add_generation_prompt %}{{ '<|im_start|>assistant\n' }}{% endif %}"
)


# ---- masks


def test_f_chat_trains_the_answer_and_its_end_of_turn() -> None:
    row = one(HI_OK)
    assert len(row.tokens) == 25
    assert trained(row) == [21, 22, 23]
    assert row.tokens[21:24].tolist() == [ord("o"), ord("k"), IM_END]
    assert row.tokens.dtype == np.int32


def test_every_assistant_turn_is_trained_or_only_the_last() -> None:
    messages = [*HI_OK, {"role": "user", "content": "hi"}, {"role": "assistant", "content": "no"}]
    assert trained(one(messages)) == [21, 22, 23, 46, 47, 48]
    assert trained(one(messages, train_on="last")) == [46, 47, 48]


def test_train_on_all_trains_every_token_but_the_first() -> None:
    assert trained(one(HI_OK, train_on="all")) == list(range(1, 25))


def test_a08_a_turn_of_weight_0_is_not_trained() -> None:
    messages = [HI_OK[0], HI_OK[1] | {"weight": 0}, HI_OK[0], HI_OK[1] | {"weight": 1}]
    found = one(messages)
    assert len(found.tokens) == 50
    assert trained(found) == [46, 47, 48]
    assert trained(one(messages, train_on="all")) == [*range(1, 21), *range(24, 50)]
    alone = [HI_OK[0], HI_OK[1] | {"weight": 0}]
    assert trained(one(alone)) == []
    assert trained(one(alone, train_on="last")) == []


def test_a13_prompt_length_is_that_of_the_prompt_rendered_alone() -> None:
    (sample,) = rendered(HI_OK)
    assert isinstance(sample, Rendered)
    prompt = byte_tokenizer().encode(sample.text[: sample.turns[0].start]).ids
    assert len(prompt) == 21
    assert one(HI_OK).tokens[:21].tolist() == prompt


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
        one(HI_OK, source)
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
        one(messages, tokenizer=merged)
    assert error.value.code == "prompt_not_prefix"
    one(HI_OK, tokenizer=merged)


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
        one(HI_OK, source, tokenizer=tokenizer)


def test_a16_tokens_of_the_generation_prompt_are_never_trained() -> None:
    source = (
        "{% for m in messages %}{{ '<|im_start|>' + m.role + '\n' }}"
        "{% if m.role == 'assistant' %}<think></think>{% endif %}{{ m.content + '<|im_end|>\n' }}{% endfor %}"
        "{% if add_generation_prompt %}{{ '<|im_start|>assistant\n<think></think>' }}{% endif %}"
    )
    row = one(HI_OK, source)
    assert text_of(row) == "ok$"
    assert len(trained(row)) == 3


@pytest.mark.parametrize("system", [None, "Be brief."])
def test_a_default_system_message_keeps_the_prompt_a_prefix(system: str | None) -> None:
    messages = [*([{"role": "system", "content": system}] if system else []), *HI_OK, *HI_OK]
    assert text_of(one(messages, DEFAULT_SYSTEM)) == "ok$ok$"


def test_characters_of_several_bytes_keep_their_place() -> None:
    messages = [{"role": "user", "content": "a\U0001f600"}, {"role": "assistant", "content": "é\U0001f600"}]
    row = one(messages)
    assert bytes(int(n) for n in row.tokens[row.mask == 1] if n < 256) == "é\U0001f600".encode()
    assert row.tokens[np.flatnonzero(row.mask)[-1]] == IM_END


def test_an_answer_that_is_empty_trains_its_end_only() -> None:
    assert text_of(one([HI_OK[0], {"role": "assistant", "content": ""}])) == "$"


def test_without_an_end_of_turn_token_the_whole_rendered_turn_is_trained() -> None:
    source = (
        "{% for m in messages %}{{ m.role + ': ' + m.content + '\n' }}{% endfor %}"
        "{% if add_generation_prompt %}{{ 'assistant: ' }}{% endif %}"
    )
    assert text_of(one(HI_OK, source)) == "ok\n"


def test_end_of_turn_ids_come_from_the_data() -> None:
    source = CHAT_TEMPLATE.replace("<|im_end|>", "<|eos|>")
    tokenizer = RowTokenizer(byte_tokenizer())
    one(HI_OK, source, tokenizer=tokenizer)
    assert tokenizer.end_of_turn == {EOS}
    tokenizer = RowTokenizer(byte_tokenizer())
    one(HI_OK, source, "all", tokenizer=tokenizer)
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
    tokenizer = RowTokenizer(byte_tokenizer())
    row = one([*messages, *messages], source, tokenizer=tokenizer)
    turn = [BOS, *b"final", EOS, *text.encode(), IM_END]
    assert row.tokens[row.mask == 1].tolist() == [*turn, *turn]
    assert tokenizer.end_of_turn == {IM_END}


def test_a_template_that_changes_the_content_is_not_asked_more_and_more() -> None:
    upper = template(CHAT_TEMPLATE.replace("message['content']", "message['content'].upper()"))
    for n in range(5):
        messages = [HI_OK[0], {"role": "assistant", "content": f"answer {n} <|eos|>"}]
        assert text_of(one(messages, upper)) == f"ANSWER {n} <|EOS|>$"
    assert upper.endings == ["<|im_end|>\n"]


def test_the_tokenizer_adds_no_token_of_its_own() -> None:
    assert one(HI_OK).tokens[0] == IM_START
