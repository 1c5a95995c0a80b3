"""Training rows: what a line of a data file may be, and the first thing wrong with one. Pure; the one home of this.

The service checks uploads with it, workers read rows with it before they render them, and a customer may run it over a
file before sending it (`finery files check`). Reading bytes (JSON, parquet) is next door; here a row is already Python
values: dict, list, str, int, float, bool, None.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from finery.data.messages import Message, check_order, read_messages
from finery.data.problems import MISSING, RowError, kind, text_of, wrong_type
from finery.data.tokens import read_tokens
from finery.data.tools import TOOL, read_tools
from finery.types.errors import Problem
from finery.types.files import FileFormat


@dataclass(frozen=True)
class ChatRow:
    """`{"messages": […], "tools"?: […]}`; also prompt and completion as lists of messages (format completion)."""

    messages: tuple[Message, ...]
    tools: tuple[dict[str, Any], ...] | None = None
    untrained: frozenset[int] = frozenset()
    """Places of assistant messages with weight 0."""
    prompt_messages: int = 0
    """Of a prompt/completion row: how many of `messages` are prompt; 0 for chat rows."""


@dataclass(frozen=True)
class CompletionRow:
    """`{"prompt": text, "completion": text}`: joined as they are, no template; an end token follows."""

    prompt: str
    completion: str


@dataclass(frozen=True)
class TextRow:
    """`{"text": text}`: an end token follows."""

    text: str


@dataclass(frozen=True)
class TokensRow:
    """`{"input_ids": […], "labels"?: […]}`: labels are the ids themselves, or -100 where a token carries no loss."""

    input_ids: tuple[int, ...]
    trained: tuple[bool, ...]
    """Per token; all True without labels."""


Row = ChatRow | CompletionRow | TextRow | TokensRow


_KEYS: dict[str, FileFormat] = {
    "messages": "chat",
    "prompt": "completion",
    "completion": "completion",
    "text": "text",
    "input_ids": "tokens",
}
_PREFERENCE = ("chosen", "rejected")
_SHAPES = "messages, or prompt and completion, or text, or input_ids"
_FOREIGN = {
    "conversations": "Rename conversations to messages, and in each from to role and value to content.",
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
    if any(key in row for key in _PREFERENCE):
        message = "expected a row to be learned as it is, found a row of preference data (chosen, rejected)"
        raise RowError("wrong_task_format", "", message, "Use this file for a job that learns preferences.")
    formats = {_KEYS[key]: key for key in _KEYS if row.get(key, MISSING) is not MISSING}
    if not formats:
        path, example = _EXAMPLES[expected or "chat"]
        hint = next((hint for key, hint in _FOREIGN.items() if key in row), f"Write {example}.")
        raise RowError("missing_messages", path, f"expected the keys {_SHAPES}; found none of them", hint)
    if len(formats) > 1:
        message = f"expected the keys of one format, found {' and '.join(formats.values())}"
        raise RowError("mixed_formats", "", message, "Keep the key that is to be trained on, and rename the others.")
    (format_,) = formats
    if expected is not None and format_ != expected:
        message = f"expected a row of format {expected} as the rows before it are, found one of format {format_}"
        raise RowError("mixed_formats", "", message, "Use one format in a file.")
    if "functions" in row:
        raise RowError("unsupported_field", "functions", "functions are not supported", f"Write tools: [{TOOL}].")
    return format_


_EXAMPLES: dict[FileFormat, tuple[str, str]] = {
    "chat": ("messages", '{"messages": [{"role": "user", "content": "…"}, {"role": "assistant", "content": "…"}]}'),
    "completion": ("prompt", '{"prompt": "…", "completion": "…"}'),
    "text": ("text", '{"text": "…"}'),
    "tokens": ("input_ids", '{"input_ids": [1, 2, 3]}'),
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
    _no_tools(row)
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
    _no_tools(row)
    return TextRow(text_of(row["text"], "text"))


def _tokens(row: dict[str, Any]) -> TokensRow:
    _no_tools(row)
    return TokensRow(*read_tokens(row))


def _no_tools(row: dict[str, Any]) -> None:
    if row.get("tools") is not None:
        message = "expected tools with messages only, for the model's template to print"
        raise RowError("unsupported_field", "tools", message, "Leave them out, or write messages.")


_READERS: dict[FileFormat, Callable[[dict[str, Any]], Row]] = {
    "chat": _chat,
    "completion": _completion,
    "text": _text,
    "tokens": _tokens,
}
