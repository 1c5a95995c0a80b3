"""Pairs: two answers to one prompt, of which the chosen one is to become likelier. Raises `RowError`.

    {"prompt": text, "chosen": text, "rejected": text}
    {"prompt" or "messages": [messages], "chosen": text or [messages], "rejected": likewise}
    {"chosen": [messages], "rejected": [messages]}    the prompt is the beginning that they share

A text that answers messages is one assistant message.
"""

from __future__ import annotations

from typing import Any, Literal

from finery.data.messages import Message, check_order, check_prompt_end, read_messages
from finery.data.problems import MISSING, RowError, no_tools, text_of, wrong_type
from finery.data.shapes import ChatRow, CompletionRow, PreferenceRow
from finery.data.tools import read_tools

ANSWERS = ("chosen", "rejected")
PromptKey = Literal["prompt", "messages"]
WHOLE = "Where chosen and rejected are whole conversations, leave prompt and messages out."
_SHOWN = '{"messages": [{"role": "user", "content": "…"}], "chosen": "…", "rejected": "…"}'


def read_pair(row: dict[str, Any]) -> PreferenceRow:
    key: PromptKey | None = "prompt" if "prompt" in row else "messages" if "messages" in row else None
    if key == "prompt" and not isinstance(row["prompt"], list):
        return _texts(row)
    if key is None:
        return _whole_conversations(row)
    prompt, _ = read_messages(row[key], key)
    chosen, rejected = (_answer(row, name) for name in ANSWERS)
    if isinstance(row["chosen"], list) != isinstance(row["rejected"], list):
        raise wrong_type("rejected", _like(row["chosen"]), row["rejected"])
    return _pair(row, prompt, (chosen, rejected), key)


def _texts(row: dict[str, Any]) -> PreferenceRow:
    prompt = text_of(row["prompt"], "prompt", "a text, or a list of messages")
    expected = "a text as the prompt is"
    for name in ANSWERS:
        if isinstance(row.get(name, MISSING), list):
            raise wrong_type(name, expected, row[name], f"Write {expected}. {WHOLE}")
    chosen, rejected = (text_of(row.get(name, MISSING), name, expected) for name in ANSWERS)
    no_tools(row)
    if not prompt:
        raise empty_prompt("prompt")
    for name, answer in zip(ANSWERS, (chosen, rejected), strict=True):
        if not answer.strip():
            raise _empty(name)
    if chosen == rejected:
        raise _identical()
    return PreferenceRow(CompletionRow(prompt, chosen), CompletionRow(prompt, rejected))


def _whole_conversations(row: dict[str, Any]) -> PreferenceRow:
    """The prompt is what both begin with."""
    for name in ANSWERS:
        if isinstance(row.get(name, MISSING), str):
            message = "expected a prompt next to answers that are texts, found none"
            raise RowError("missing_prompt", "prompt", message, f"Write {_SHOWN}.")
    chosen, rejected = (_messages(row, name) for name in ANSWERS)
    if chosen == rejected:
        raise _identical()
    shared = next((n for n, (a, b) in enumerate(zip(chosen, rejected, strict=False)) if a != b), None)
    if shared is None:
        shared = min(len(chosen), len(rejected))
        name = ANSWERS[len(rejected) < len(chosen)]
        message = f"expected an answer behind the {shared} message{'s' * (shared > 1)} that both begin with, found none"
        raise RowError("empty_answer", name, message, "Give both sides an answer to the same prompt.")
    if not shared:
        message = "expected conversations that begin with the same messages, found others in the first place"
        raise RowError("missing_prompt", "chosen[0]", message, f"Write the prompt apart: {_SHOWN}.")
    return _pair(row, chosen[:shared], (chosen[shared:], rejected[shared:]), None)


def _messages(row: dict[str, Any], name: str) -> list[Message]:
    messages, untrained = read_messages(row.get(name, MISSING), name)
    if untrained:
        message = "expected no weight of 0 in a pair, whose answers are trained whole, found one"
        raise RowError("invalid_weight", f"{name}[{min(untrained)}].weight", message, "Leave the weight out.")
    return messages


def _answer(row: dict[str, Any], name: str) -> list[Message]:
    value = row.get(name, MISSING)
    if isinstance(value, list):
        return _messages(row, name)
    return [{"role": "assistant", "content": text_of(value, name, "a text or a list of messages")}]


def _pair(
    row: dict[str, Any], prompt: list[Message], answers: tuple[list[Message], list[Message]], key: PromptKey | None
) -> PreferenceRow:
    tools, count = read_tools(row.get("tools")), len(prompt)
    shared = 0 if key else count
    """Where the answers begin in the lists that hold them."""
    sides = []
    for name, answer in zip(ANSWERS, answers, strict=True):

        def place(n: int, name: str = name) -> str:
            return f"{key or name}[{n}]" if n < count else f"{name}[{n - count + shared}]"

        _check_begin(answer, name, shared)
        check_order([*prompt, *answer], place)
        check_prompt_end(prompt, place)
        if all(_is_empty(message) for message in answer if message["role"] == "assistant"):
            raise _empty(name)
        sides.append(ChatRow((*prompt, *answer), tools, prompt_messages=count))
    if answers[0] == answers[1]:
        raise _identical()
    chosen, rejected = sides
    return PreferenceRow(chosen, rejected, key)


def _check_begin(answer: list[Message], name: str, shared: int) -> None:
    if answer and answer[0]["role"] == "assistant":
        return
    found = answer[0]["role"] if answer else "no message"
    path = f"{name}[{shared}]" if answer else name
    message = f"expected the answer to begin with an assistant message, found {found}"
    raise RowError("role_order", path, message, f"Both answers must go on from the same prompt. {WHOLE}")


def _is_empty(message: Message) -> bool:
    others = message.get("reasoning_content", "").strip() or message.get("tool_calls")
    return not message["content"].strip() and not others


def _like(chosen: Any) -> str:
    return "a list of messages as chosen is" if isinstance(chosen, list) else "a text as chosen is"


def empty_prompt(path: str) -> RowError:
    message = "expected a prompt, found an empty text"
    return RowError("empty_prompt", path, message, "Write what is to be answered.")


def _empty(name: str) -> RowError:
    message = "expected an answer, found an empty one"
    return RowError("empty_answer", name, message, "Leave the row out, or write what was answered.")


def _identical() -> RowError:
    message = "expected two answers, found the same one twice, which teaches nothing"
    return RowError("identical_answers", "rejected", message, "Leave the row out.")
