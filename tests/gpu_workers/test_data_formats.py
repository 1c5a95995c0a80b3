"""Rows that no template writes: prompt and completion as texts, text, token ids. One byte is one token."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from tokenizers import Tokenizer, models, pre_tokenizers
from tokenizers.processors import TemplateProcessing

from finery_gpu_workers.data.chat import RowError
from finery_gpu_workers.data.folder import end_tokens
from finery_gpu_workers.data.rows import check_train_on
from finery_gpu_workers.data.tokens import RowTokenizer, add_tokens
from finery_gpu_workers.errors import WorkerError
from finery_testing.tiny import BOS, EOS, IM_END, byte_tokenizer, make_tiny_model

from .samples import one, tokenised, trained


def with_bos() -> Tokenizer:
    """As Llama's and Gemma's: its own post-processor puts BOS before a text."""
    tokenizer = byte_tokenizer()
    tokenizer.post_processor = TemplateProcessing(single="<|bos|> $A", special_tokens=[("<|bos|>", BOS)])
    return tokenizer


def test_a_completion_and_its_end_are_trained() -> None:
    row = one({"prompt": "ab", "completion": "cd"})
    assert row.tokens.tolist() == [*b"abcd", EOS]
    assert trained(row) == [2, 3, 4]
    assert trained(one({"prompt": "ab", "completion": "cd"}, train_on="all")) == [1, 2, 3, 4]
    assert trained(one({"prompt": "", "completion": "cd"})) == [1, 2]


def test_a_bos_that_the_tokenizer_adds_itself_begins_text_but_not_what_a_template_wrote() -> None:
    row = one({"prompt": "ab", "completion": "c"}, tokenizer=with_bos())
    assert row.tokens.tolist() == [BOS, *b"abc", EOS]
    assert trained(row) == [3, 4]
    assert trained(one({"prompt": "", "completion": "c"}, tokenizer=with_bos())) == [1, 2]
    text = one({"text": "abc"}, tokenizer=with_bos())
    assert text.tokens.tolist() == [BOS, *b"abc", EOS]
    assert trained(text) == [1, 2, 3, 4]
    chat = [{"role": "user", "content": "hi"}, {"role": "assistant", "content": "ok"}]
    assert BOS not in one(chat, tokenizer=with_bos()).tokens


def test_a_bos_is_found_where_the_vocabulary_is_small() -> None:
    """As that of a model of proteins: no lower case."""
    tokenizer = Tokenizer(models.BPE(vocab={"A": 0, "M": 1}, merges=[]))
    tokenizer.add_special_tokens(["<s>"])
    tokenizer.post_processor = TemplateProcessing(single="<s> $A", special_tokens=[("<s>", 2)])
    assert one({"text": "MA"}, tokenizer=RowTokenizer(tokenizer, [EOS])).tokens.tolist() == [2, 1, 0, EOS]


def test_all_of_a_text_but_its_first_token_is_trained() -> None:
    row = one({"text": "éb"})
    assert row.tokens.tolist() == [*"éb".encode(), EOS]
    assert trained(row) == [1, 2, 3]


def test_tokens_are_taken_as_they_are() -> None:
    row = one({"input_ids": [5, 6, 7], "labels": [5, -100, 7]})
    assert row.tokens.tolist() == [5, 6, 7]
    assert trained(row) == [2]  # nothing precedes the first
    assert trained(one({"input_ids": [5, 6, 7]})) == [1, 2]


def spaces() -> Tokenizer:
    """A blank and the letter behind it are one token, as in most vocabularies."""
    vocab = json.loads(byte_tokenizer().to_str())["model"]["vocab"]
    tokenizer = Tokenizer(models.BPE(vocab=vocab | {"Ġo": 261}, merges=[("Ġ", "o")]))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    tokenizer.add_special_tokens(["<|eos|>"])
    return tokenizer


def test_a13_a_token_across_the_end_of_a_prompt_refuses_the_row_and_says_what_to_do() -> None:
    with pytest.raises(RowError) as error:
        tokenised({"prompt": "a: ", "completion": "ok"}, tokenizer=spaces())
    assert (error.value.code, error.value.path) == ("prompt_not_prefix", "prompt")
    assert "white space" in error.value.hint
    row = one({"prompt": "a:", "completion": " ok"}, tokenizer=spaces())
    assert row.tokens.tolist() == [ord("a"), ord(":"), 261, ord("k"), EOS]
    assert trained(row) == [2, 3, 4]


def test_the_end_token_is_found_by_its_text_and_known_to_serving(tmp_path: Path) -> None:
    folder = make_tiny_model(tmp_path)
    rows = RowTokenizer.load(folder)
    assert one({"text": "a"}, tokenizer=rows).tokens.tolist() == [ord("a"), EOS]
    assert rows.end_of_turn == {EOS}
    assert end_tokens(folder, byte_tokenizer()) == [EOS, IM_END]
    settings = json.loads((folder / "tokenizer_config.json").read_text())
    (folder / "tokenizer_config.json").write_text(json.dumps(settings | {"eos_token": {"content": "<|im_end|>"}}))
    assert end_tokens(folder, byte_tokenizer()) == [IM_END, EOS]
    del settings["eos_token"]
    (folder / "tokenizer_config.json").write_text(json.dumps(settings))
    assert end_tokens(folder, byte_tokenizer()) == [IM_END, EOS]  # the generation settings', in their order


def test_a_model_without_an_end_token_cannot_end_a_text() -> None:
    with pytest.raises(WorkerError, match="expected an end token"):
        one({"text": "a"}, tokenizer=RowTokenizer(byte_tokenizer()))


def test_added_tokens_get_the_next_ids_and_are_one_token_each() -> None:
    tokenizer = byte_tokenizer()
    assert add_tokens(tokenizer, ["<a>", "<|im_end|>", "<a>", "<b>"]) == 2
    assert one({"text": "x<a>y<b><|im_end|>"}, tokenizer=tokenizer).tokens.tolist() == [
        ord("x"), 261, ord("y"), 262, IM_END, EOS,
    ]  # fmt: skip


@pytest.mark.parametrize(("format_", "train_on"), [("chat", "completion"), ("text", "completion"), ("text", "last")])
def test_what_has_no_meaning_is_refused(format_: str, train_on: str) -> None:
    with pytest.raises(WorkerError) as error:
        check_train_on(format_, train_on)  # type: ignore[arg-type]
    assert (error.value.code, error.value.param) == ("train_on_not_possible", "hyperparameters.train_on")
    check_train_on(format_, "assistant")  # type: ignore[arg-type]
    check_train_on("completion", train_on)  # type: ignore[arg-type]
    check_train_on("tokens", train_on)  # type: ignore[arg-type]
