"""Random conversations under the templates of well-known models: ids and masks against text put together by hand.

An oracle says, message by message, what is given to the model, what it generates, and what the template adds behind it.
It knows no Jinja, and the code under test knows no oracle.
"""

from __future__ import annotations

import json
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from tokenizers import Tokenizer
from transformers import PreTrainedTokenizerFast

from finery.data.rows import ChatRow, read_row
from finery_gpu_workers.data.tokens import RowTokenizer, TokenRow, add_tokens
from finery_testing.templates import LLAMA3, MISTRAL, OPENS_REASONING, QWEN3, SPECIAL, STRIPS_REASONING
from finery_testing.tiny import CHAT_TEMPLATE, EOS, IM_END, byte_tokenizer

from .samples import template, tokenised

Message = dict[str, Any]
Piece = tuple[str, str, str]
"""Of one message: what is given to the model, what it generates (assistant only), what follows."""
Oracle = Callable[[list[Message], list[Any] | None], list[Piece]]

# `strip` in Python and in Jinja are the same; an x at either end keeps white space inside the content.
texts = st.text('ab \n{"é\U0001f600', max_size=8)
reasons = st.text("pq \nü", min_size=1, max_size=5).map(lambda text: f"r{text}s")
TOOL = {"type": "function", "function": {"name": "look", "parameters": {"zip": None, "a": [1, 2.5]}}}


def chatml(messages: list[Message], _: list[Any] | None) -> list[Piece]:
    return [_chatml_piece(m["role"], m["content"]) for m in messages]


def _chatml_piece(role: str, content: str) -> Piece:
    header = f"<|im_start|>{role}\n"
    if role == "assistant":
        return header, f"{content}<|im_end|>", "\n"
    return f"{header}{content}<|im_end|>\n", "", ""


def llama3(messages: list[Message], _: list[Any] | None) -> list[Piece]:
    pieces = []
    for n, m in enumerate(messages):
        header = f"{'' if n else '<|bos|>'}<|start_header_id|>{m['role']}<|end_header_id|>\n\n"
        body = f"{m['content'].strip()}<|eot_id|>"
        pieces.append((header, body, "") if m["role"] == "assistant" else (header + body, "", ""))
    return pieces


def mistral(messages: list[Message], _: list[Any] | None) -> list[Piece]:
    pieces = []
    for n, m in enumerate(messages):
        if m["role"] == "assistant":
            pieces.append(("", f" {m['content']}<|eos|>", ""))
        else:
            pieces.append((f"{'' if n else '<|bos|>'}[INST] {m['content']} [/INST]", "", ""))
    return pieces


def strips(messages: list[Message], _: list[Any] | None) -> list[Piece]:
    last_question = max(n for n, m in enumerate(messages) if m["role"] == "user")
    return [
        _chatml_piece(m["role"], m["content"].rpartition("</think>")[2] if n < last_question else m["content"])
        for n, m in enumerate(messages)
    ]


def opens(messages: list[Message], _: list[Any] | None) -> list[Piece]:
    pieces = []
    for m in messages:
        reasoning, content = m.get("reasoning_content", ""), m["content"]
        if "</think>" in content:
            before, _, content = content.rpartition("</think>")
            reasoning, content = before.rpartition("<think>")[2].strip("\n"), content.lstrip("\n")
        if m["role"] == "assistant":
            said = f"{reasoning}\n</think>\n\n{content}<|im_end|>"
            pieces.append(("<|im_start|>assistant\n<think>\n", said, "\n"))
        else:
            pieces.append(_chatml_piece(m["role"], m["content"]))
    return pieces


def qwen3(messages: list[Message], tools: list[Any] | None) -> list[Piece]:
    last_question = max(n for n, m in enumerate(messages) if m["role"] == "user")
    pieces: list[Piece] = []
    for n, m in enumerate(messages):
        if m["role"] == "assistant":
            pieces.append(_qwen3_answer(m, after=n > last_question, last=n == len(messages) - 1))
        elif m["role"] == "tool":
            before = "" if messages[n - 1]["role"] == "tool" else "<|im_start|>user"
            after = "" if n + 1 < len(messages) and messages[n + 1]["role"] == "tool" else "<|im_end|>\n"
            pieces.append((f"{before}\n<tool_response>\n{m['content']}\n</tool_response>{after}", "", ""))
        else:
            pieces.append(_chatml_piece(m["role"], m["content"]))
    if tools:
        system = messages[0]["content"] + "\n\n" if messages[0]["role"] == "system" else ""
        listed = "".join(f"\n{json.dumps(tool)}" for tool in tools)
        head = f"<|im_start|>system\n{system}# Tools\n\n<tools>{listed}\n</tools><|im_end|>\n"
        first = "" if system or messages[0]["role"] == "system" else pieces[0][0]
        pieces[0] = (head + first, *pieces[0][1:])
    return pieces


def _qwen3_answer(m: Message, *, after: bool, last: bool) -> Piece:
    reasoning, content = m.get("reasoning_content", ""), m["content"]
    if "reasoning_content" not in m and "</think>" in content:
        before, _, content = content.rpartition("</think>")
        reasoning, content = before.partition("<think>")[2].strip("\n"), content.lstrip("\n")
    calls = [f'<tool_call>\n{{"name": "look", "arguments": {c["function"]["arguments"]}}}\n</tool_call>'
             for c in m.get("tool_calls", ())]  # fmt: skip
    called = "\n".join(calls)
    if calls and content:
        called = "\n" + called
    if after and (last or reasoning):
        content = "<think>\n" + reasoning.strip("\n") + "\n</think>\n\n" + content.lstrip("\n")
    return "<|im_start|>assistant\n", f"{content}{called}<|im_end|>", "\n"


STYLES: dict[str, tuple[str, Oracle]] = {
    "chatml": (CHAT_TEMPLATE, chatml),
    "llama3": (LLAMA3, llama3),
    "mistral": (MISTRAL, mistral),
    "strips": (STRIPS_REASONING, strips),
    "opens": (OPENS_REASONING, opens),
    "qwen3": (QWEN3, qwen3),
}


@st.composite
def answers(draw: st.DrawFn, reasoning: bool) -> Message:
    message: Message = {"role": "assistant", "content": draw(texts)}
    if reasoning and draw(st.booleans()):
        reason = draw(reasons)
        if draw(st.booleans()):
            message["content"] = f"<think>{reason}</think>{message['content']}"
        else:
            message["reasoning_content"] = reason
    if draw(st.integers(0, 4)) == 0:
        message["weight"] = 0
    return message


@st.composite
def conversations(draw: st.DrawFn, style: str) -> tuple[list[Message], list[Any] | None]:
    messages: list[Message] = []
    if style != "mistral" and draw(st.booleans()):
        messages.append({"role": "system", "content": draw(texts)})
    tools = [TOOL] if style == "qwen3" and draw(st.booleans()) else None
    for _ in range(draw(st.integers(1, 3))):
        messages.append({"role": "user", "content": draw(texts)})
        for call in range(draw(st.integers(0, 2)) if tools else 0):
            arguments = json.dumps({"city": draw(texts), "n": draw(st.none() | st.integers())}, ensure_ascii=False)
            function = {"name": "look", "arguments": arguments}
            calls = [{"id": f"{len(messages)}-{call}", "type": "function", "function": function}]
            asking = draw(answers(True)) | {"tool_calls": calls}
            messages += [asking, {"role": "tool", "tool_call_id": calls[0]["id"], "content": draw(texts)}]
        messages.append(draw(answers(style in ("strips", "opens", "qwen3"))))
    if style == "strips":
        for m in messages:
            m.pop("reasoning_content", None)  # it knows reasoning in the content only
    return messages, tools


def expected(oracle: Oracle, messages: list[Message], tools: list[Any] | None) -> list[tuple[list[Piece], set[int]]]:
    """Samples: their pieces, and which of them are trained."""
    wanted = [n for n, m in enumerate(messages) if m["role"] == "assistant" and m.get("weight") != 0]
    whole = oracle(messages, tools)
    alone = {n: oracle(messages[: n + 1], tools) for n in wanted}
    if all(whole[: n + 1] == pieces for n, pieces in alone.items()):
        return [(whole, set(wanted))]
    return [(alone[n], {n}) for n in wanted]


def encoded(tokenizer: Tokenizer, pieces: list[Piece], wanted: set[int]) -> tuple[list[int], list[int]]:
    """Ids and mask; a byte tokenizer makes the same of the parts as of the whole."""
    ids: list[int] = []
    mask: list[int] = []
    for n, piece in enumerate(pieces):
        for part, text in enumerate(piece):
            found = tokenizer.encode(text, add_special_tokens=False).ids
            ids += found
            mask += [int(part == 1 and n in wanted)] * len(found)
    return ids, mask


def check(style: str, messages: list[Message], tools: list[Any] | None, rows: list[TokenRow]) -> None:
    tokenizer = byte_tokenizer()
    add_tokens(tokenizer, SPECIAL)
    samples = expected(STYLES[style][1], messages, tools)
    assert [(row.tokens.tolist(), row.mask.tolist()) for row in rows] == [
        encoded(tokenizer, pieces, wanted) for pieces, wanted in samples
    ]
    assert all(row.tokens.dtype == np.int32 for row in rows)


@pytest.mark.parametrize("style", STYLES)
def test_texts_are_those_of_transformers(style: str) -> None:
    source, _ = STYLES[style]
    ours = template(source)
    peer = PreTrainedTokenizerFast(tokenizer_object=byte_tokenizer(), bos_token="<|bos|>", eos_token="<|eos|>")

    @given(conversations(style), st.booleans())
    def over_random_conversations(conversation: tuple[list[Message], list[Any] | None], prompt: bool) -> None:
        read = read_row({"messages": conversation[0]} | ({"tools": conversation[1]} if conversation[1] else {}))
        assert isinstance(read, tuple)
        assert isinstance(read[1], ChatRow)
        expected = peer.apply_chat_template(
            list(read[1].messages),
            tools=conversation[1],
            chat_template=source,
            add_generation_prompt=prompt,
            tokenize=False,
        )
        assert ours.render(read[1].messages, prompt=prompt, tools=read[1].tools) == expected

    over_random_conversations()


@pytest.mark.parametrize("style", STYLES)
def test_masks_are_those_of_an_oracle(style: str) -> None:
    source, _ = STYLES[style]
    shared = template(source)
    tokenizer = byte_tokenizer()
    add_tokens(tokenizer, SPECIAL)
    rows = RowTokenizer(tokenizer, [EOS, IM_END])

    @given(conversations(style))
    def over_random_conversations(conversation: tuple[list[Message], list[Any] | None]) -> None:
        messages, tools = conversation
        row = {"messages": messages} | ({"tools": tools} if tools else {})
        check(style, messages, tools, tokenised(row, shared, tokenizer=rows))

    over_random_conversations()
