"""Prompts that answers are sampled to, with what graders need to know. Raises `RowError`.

    {"prompt": text or [messages], …}
    {"messages": [messages that end with a user's or a tool's], at least one more field, …}

All other fields are free JSON. The row as a whole is the item that graders see.
"""

from __future__ import annotations

from typing import Any, Literal

from finery.data.messages import check_conversation, check_prompt_end, read_messages
from finery.data.preference import empty_prompt
from finery.data.problems import RowError, check_json, no_tools, text_of
from finery.data.shapes import PromptRow
from finery.data.tools import read_tools

_OF_THE_PROMPT = frozenset({"messages", "tools"})
_HINTS = {
    "prompt": "End the prompt with what is to be answered.",
    "messages": "End it with what is to be answered. If rows are conversations to learn, the first lacks its answer.",
}


def is_open(row: dict[str, Any]) -> bool:
    """Whether a row of messages is a prompt: it waits for an answer, and has a field for graders."""
    messages = row["messages"]
    last = messages[-1] if isinstance(messages, list) and messages else None
    return isinstance(last, dict) and last.get("role") in ("user", "tool") and not _OF_THE_PROMPT.issuperset(row)


def read_prompt(row: dict[str, Any]) -> PromptRow:
    key: Literal["prompt", "messages"] = "prompt" if "prompt" in row else "messages"
    if key == "prompt" and not isinstance(row["prompt"], list):
        text = text_of(row["prompt"], "prompt", "a text, or a list of messages")
        if not text:
            raise empty_prompt("prompt")
        no_tools(row)
        check_json(row, "")
        return PromptRow(text=text, item=row)
    messages, _ = read_messages(row[key], key)

    def place(n: int) -> str:
        return f"{key}[{n}]"

    check_prompt_end(messages, place, _HINTS[key])
    check_conversation(messages, place)
    if key == "messages" and _OF_THE_PROMPT.issuperset(row):
        message = "expected a field for graders next to messages, found none"
        raise RowError("missing_field", "", message, "Add one, or rename messages to prompt.")
    check_json(row, "")
    return PromptRow(tuple(messages), None, read_tools(row.get("tools")), row, key)
