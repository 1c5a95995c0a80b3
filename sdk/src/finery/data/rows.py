"""Training rows: what a line of a data file may be, and the first thing wrong with one. Pure; the one home of this.

The service checks uploads with it, workers read rows with it before they render them, and a customer may run it over a
file before sending it (`finery files check`). Reading bytes (JSON, parquet) is next door; here a row is already Python
values: dict, list, str, int, float, bool, None.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from finery.types.errors import Problem
from finery.types.files import FileFormat

Message = dict[str, Any]
"""As templates see it: `role`; `content` (text; parts are joined; absent or null is ""); and only if the row has them
`reasoning_content`, `tool_calls` ([{"id"?, "type": "function", "function": {"name", "arguments": object}}]),
`tool_call_id`, `name`. `arguments` given as JSON text are parsed, so that templates print them alike. No key is added
that was not uploaded, and a key inside arguments or tool schemas that was uploaded as null stays null."""


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


def read_row(value: Any, expected: FileFormat | None = None) -> tuple[FileFormat, Row] | Problem:
    """The row and its format, or the first thing wrong with it (without line and offset).

    `expected` is the format of the file's first good row: a row of another one is a `mixed_formats` problem.
    """
    raise NotImplementedError
