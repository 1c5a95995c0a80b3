"""What of a row the model's template leaves out without a word; reasoning is looked for turn by turn (`reasoning.py`).

The same words elsewhere hide what is missing: this is for warnings, not for masks.
"""

from __future__ import annotations

from typing import Any

from finery.data.messages import Message
from finery.data.rows import ChatRow
from finery_gpu_workers.data.chat import RowError, Template
from finery_gpu_workers.data.given import as_json
from finery_gpu_workers.data.reasoning import CLOSE

_RENDERED_AGAIN = 4
"""Calls of a row, at most, that are looked for by rendering it with other ones."""
_OUT_OF_ORDER = 16


def missing_from(template: Template, row: ChatRow, text: str, *, prompt: bool = False) -> frozenset[str]:
    """Codes of warnings. `text`: the row as the template wrote it, with `prompt` as one that is to be answered."""
    found = set()
    if row.tools:
        if template.takes_tools is None:
            template.takes_tools = _differs(template, text, row.messages, None, prompt)
        if not template.takes_tools:
            found.add("tools_not_rendered")
    first = row.messages[0]
    system = first["role"] in ("system", "developer")
    if system and first["content"].strip() not in text:
        found.add("system_not_rendered")
    if not _contents_are_in(row.messages[system:], text):
        found.add("content_not_rendered")
    if any("tool_calls" in message for message in row.messages) and not _calls_are_in(template, row, text, prompt):
        found.add("tools_not_rendered")
    return frozenset(found)


def _differs(template: Template, text: str, messages: tuple[Message, ...], tools: Any, prompt: bool) -> bool:
    try:
        return template.render(messages, prompt=prompt, tools=tools) != text
    except RowError:
        return True


def _contents_are_in(messages: tuple[Message, ...], text: str) -> bool:
    """In the order of the messages, but for a few; white space around them does not count."""
    place, others = 0, _OUT_OF_ORDER
    for message in messages:
        content = message["content"]
        if message["role"] == "assistant":
            content = content.rpartition(CLOSE)[2]
        content = content.strip()
        end = _find(text, content, place)
        if end < 0 and others:
            others -= 1
            end = _find(text, content, 0)
        if end < 0:
            return not others  # so many are out of order that nothing can be said
        place = end
    return True


def _find(text: str, content: str, place: int) -> int:
    """Where it ends, as it is or inside of JSON; or -1."""
    found = text.find(content, place)
    if found < 0:
        content = as_json(content)[1:-1]
        found = text.find(content, place)
    return found + len(content) if found >= 0 else -1


def _calls_are_in(template: Template, row: ChatRow, text: str, prompt: bool) -> bool:
    places = [(n, k) for n, m in enumerate(row.messages) for k in range(len(m.get("tool_calls", ())))]
    functions = [row.messages[n]["tool_calls"][k]["function"] for n, k in places]
    if any(function["name"] not in text for function in functions):
        return False
    place = 0
    for function in functions:
        place = _find(text, as_json(function["arguments"]), place)
        if place < 0:  # written in another way, perhaps; a template that leaves some out writes the first
            return all(_matters(template, row, text, n, k, prompt) for n, k in places[-_RENDERED_AGAIN:])
    return True


def _matters(template: Template, row: ChatRow, text: str, n: int, k: int, prompt: bool) -> bool:
    """Whether the row is written otherwise if the call's arguments are other ones."""
    message = row.messages[n]
    calls = list(message["tool_calls"])
    name = calls[k]["function"]["name"]
    calls[k] = calls[k] | {"function": other_call(calls[k])["function"] | {"name": name}}
    changed = message | {"tool_calls": calls}
    return _differs(template, text, (*row.messages[:n], changed, *row.messages[n + 1 :]), row.tools, prompt)


def other_call(call: dict[str, Any]) -> dict[str, Any]:
    """Another name and other arguments, neither of which ends as those of `call` do."""
    function = call["function"]
    name = function["name"]
    letter = "y" if str(function.get("arguments")).rstrip("}' \"").endswith("x") else "x"
    other = {"name": name + ("y" if name.endswith("x") else "x"), "arguments": {"x": letter}}
    return call | {"function": function | other}
