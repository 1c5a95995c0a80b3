"""Training rows: what a line of a data file may be, and the first thing wrong with one. Pure; the one home of this.

The service checks uploads with it, workers read rows with it before they render them, and a customer may run it over a
file before sending it (`finery files check`). Reading bytes (JSON, parquet) is next door; here a row is already Python
values: dict, list, str, int, float, bool, None.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from finery.data.messages import check_order, read_messages
from finery.data.preference import ANSWERS, WHOLE, read_pair
from finery.data.problems import MISSING, RowError, kind, no_tools, text_of, wrong_type
from finery.data.prompts import is_open, read_prompt
from finery.data.shapes import ChatRow, CompletionRow, PreferenceRow, PromptRow, Row, TextRow, TokensRow
from finery.data.tokens import read_tokens
from finery.data.tools import TOOL, read_tools
from finery.types.errors import Problem
from finery.types.files import FileFormat

__all__ = [
    "PROMPT_KEYS",
    "ChatRow",
    "CompletionRow",
    "PreferenceRow",
    "PromptRow",
    "Row",
    "TextRow",
    "TokensRow",
    "read_row",
]

_KEYS: dict[str, FileFormat] = {
    "messages": "chat",
    "prompt": "completion",
    "completion": "completion",
    "text": "text",
    "input_ids": "tokens",
}
PROMPT_KEYS = frozenset({*_KEYS, *ANSWERS} - {"messages", "prompt"})
"""Keys that a row of prompts does not have."""
_SHAPES = "messages, or prompt and completion, or chosen and rejected, or prompt, or text, or input_ids"
_FOREIGN = {
    "conversations": "Rename conversations to messages, and in each from to role and value to content.",
    "preferred_output": (
        'Write {"messages": […], "chosen": […], "rejected": […]}: the messages of input, preferred_output and '
        "non_preferred_output."
    ),
    "question": "Rename question to prompt, and what is to be learned as it is (not by graders) to completion.",
    "instruction": 'Write {"prompt": "…", "completion": "…"} or messages instead of instruction and output.',
}


def read_row(value: Any, expected: FileFormat | None = None) -> tuple[FileFormat, Row] | Problem:
    """The row and its format, or the first thing wrong with it (without line and offset).

    `expected` is the format of the file's first good row: a row of another one is a `mixed_formats` problem.
    """
    try:
        format_ = _format_of(value, expected)
        return format_, _READERS[format_](value)
    except RowError as wrong:
        return wrong.problem


def _format_of(row: Any, expected: FileFormat | None) -> FileFormat:
    if not isinstance(row, dict):
        hint = 'Write one object per row: {"messages": […]}.'
        raise RowError("not_an_object", "", f"expected a JSON object, found {kind(row)}", hint)
    formats = _formats(row, expected)
    if not formats:
        path, example = _EXAMPLES[expected or "chat"]
        hint = next((hint for key, hint in _FOREIGN.items() if key in row), f"Write {example}.")
        raise RowError("missing_messages", path, f"expected the keys {_SHAPES}; found none of them", hint)
    if len(formats) > 1:
        message = f"expected the keys of one format, found {' and '.join(formats.values())}"
        hint = "Keep the key that is to be trained on, and rename the others."
        if {"preference", "chat"} <= formats.keys():
            hint = f"Keep either prompt or messages. {WHOLE}"
        raise RowError("mixed_formats", "", message, hint)
    (format_,) = formats
    if expected is not None and format_ != expected:
        message = f"expected a row of format {expected} as the rows before it are, found one of format {format_}"
        raise RowError("mixed_formats", "", message, "Use one format in a file.")
    if "functions" in row and format_ != "prompts":
        raise RowError("unsupported_field", "functions", "functions are not supported", f"Write tools: [{TOOL}].")
    return format_


def _formats(row: dict[str, Any], expected: FileFormat | None) -> dict[FileFormat, str]:
    """The formats that the row has keys of, each with one of them."""
    keys = {key for key in _KEYS if row.get(key, MISSING) is not MISSING}
    formats = {_KEYS[key]: key for key in _KEYS if key in keys}
    if any(key in row for key in ANSWERS):
        others = {format_: key for format_, key in formats.items() if key in ("completion", "text", "input_ids")}
        if {"prompt", "messages"} <= keys:
            others = {"chat": "messages", "completion": "prompt"}
        return {**others, "preference": next(key for key in ANSWERS if key in row)}
    if keys == {"prompt"} and expected != "completion":
        return {"prompts": "prompt"}
    if keys == {"messages"} and (expected == "prompts" or (expected != "chat" and is_open(row))):
        return {"prompts": "messages"}
    return formats


_EXAMPLES: dict[FileFormat, tuple[str, str]] = {
    "chat": ("messages", '{"messages": [{"role": "user", "content": "…"}, {"role": "assistant", "content": "…"}]}'),
    "completion": ("prompt", '{"prompt": "…", "completion": "…"}'),
    "text": ("text", '{"text": "…"}'),
    "tokens": ("input_ids", '{"input_ids": [1, 2, 3]}'),
    "preference": ("chosen", '{"prompt": "…", "chosen": "…", "rejected": "…"}'),
    "prompts": ("prompt", '{"prompt": "…"}'),
}
"""The key of a format that has to be there, and a row of it."""


def _chat(row: dict[str, Any]) -> ChatRow:
    messages, untrained = read_messages(row["messages"], "messages")
    check_order(messages, "messages[{}]".format)
    return ChatRow(tuple(messages), read_tools(row.get("tools")), frozenset(untrained))


def _completion(row: dict[str, Any]) -> CompletionRow | ChatRow:
    prompt, completion = (row.get(key, MISSING) for key in ("prompt", "completion"))
    if isinstance(prompt, list):
        if not isinstance(completion, list):
            raise wrong_type("completion", "a list of messages as the prompt is", completion)
        return _conversation(row)
    expected = "a text, or a list of messages in both prompt and completion"
    text = text_of(prompt, "prompt", expected)
    answer = text_of(completion, "completion", "a text as the prompt is")
    no_tools(row)
    return CompletionRow(text, answer)


def _conversation(row: dict[str, Any]) -> ChatRow:
    prompt, untrained = read_messages(row["prompt"], "prompt")
    completion, untrained_completion = read_messages(row["completion"], "completion")
    count = len(prompt)

    def place(n: int) -> str:
        return f"prompt[{n}]" if n < count else f"completion[{n - count}]"

    if not completion or completion[0]["role"] != "assistant":
        found = completion[0]["role"] if completion else "no message"
        message = f"expected the completion to begin with an assistant message, found {found}"
        raise RowError("role_order", "completion", message, "Move what comes before the answer into the prompt.")
    check_order([*prompt, *completion], place)
    return ChatRow(
        messages=(*prompt, *completion),
        tools=read_tools(row.get("tools")),
        untrained=frozenset(untrained | {count + n for n in untrained_completion}),
        prompt_messages=count,
    )


def _text(row: dict[str, Any]) -> TextRow:
    no_tools(row)
    return TextRow(text_of(row["text"], "text"))


def _tokens(row: dict[str, Any]) -> TokensRow:
    no_tools(row)
    return TokensRow(*read_tokens(row))


_READERS: dict[FileFormat, Callable[[dict[str, Any]], Row]] = {
    "chat": _chat,
    "completion": _completion,
    "text": _text,
    "tokens": _tokens,
    "preference": read_pair,
    "prompts": read_prompt,
}
