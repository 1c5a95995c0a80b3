"""What rows are read as, format by format."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any, Literal

from finery.data.messages import Message


@dataclass(frozen=True)
class ChatRow:
    """`{"messages": […], "tools"?: […]}`; also prompt and completion as lists of messages (format completion)."""

    messages: tuple[Message, ...]
    tools: tuple[dict[str, Any], ...] | None = None
    untrained: frozenset[int] = frozenset()
    """Places of assistant messages with weight 0."""
    prompt_messages: int = 0
    """Of a prompt/completion row, or of one side of a pair: how many of `messages` are prompt; 0 for chat rows."""


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


@dataclass(frozen=True)
class PreferenceRow:
    """Two answers to one prompt, each with it: conversations with the same first `prompt_messages`, or texts."""

    chosen: ChatRow | CompletionRow
    rejected: ChatRow | CompletionRow
    prompt_key: Literal["prompt", "messages"] | None = "prompt"
    """Where the row has its prompt; None where it is the beginning that both conversations share."""


@dataclass(frozen=True)
class PromptRow:
    """A prompt that answers are sampled to, with all that graders may want to know of it."""

    messages: tuple[Message, ...] = ()
    """Empty where the prompt is a text."""
    text: str | None = None
    tools: tuple[dict[str, Any], ...] | None = None
    item: dict[str, Any] = field(default_factory=dict)
    """The whole row, as it was uploaded."""
    key: Literal["prompt", "messages"] = "prompt"
    """Where the row has its prompt."""


Row = ChatRow | CompletionRow | TextRow | TokensRow | PreferenceRow | PromptRow
