"""One row of a chat file, `{"messages": [{"role", "content"}, …]}`: what is wrong with it, if anything. Pure."""

from __future__ import annotations

from typing import Any

from finery.data.strict_json import shown
from finery.types.errors import Problem

ROLES = ("system", "user", "assistant")
_KINDS = {type(None): "null", bool: "a boolean", int: "a number", float: "a number", str: "a text", list: "a list"}
_MESSAGE_KEYS = frozenset({"role", "content", "weight"})
_UNSUPPORTED = ("tools", "functions")
_PREFERENCE = ("chosen", "rejected")


def chat_problem(row: Any, *, others_are_chat: bool) -> Problem | None:
    """The first thing wrong with a parsed row; `others_are_chat` if a row before it was one. Without its line."""
    if not isinstance(row, dict):
        hint = 'Write one object per line: {"messages": […]}.'
        return _problem("not_an_object", "", f"expected a JSON object, found {kind(row)}", hint)
    if "messages" not in row:
        return _without_messages(row, others_are_chat=others_are_chat)
    for key in _UNSUPPORTED:
        if key in row:
            return _problem("unsupported_field", key, f"{key} are not supported yet", "Leave them out.")
    messages = row["messages"]
    if not isinstance(messages, list):
        return _wrong_type("messages", "a list of messages", messages)
    for place, message in enumerate(messages):
        problem = _message_problem(message, f"messages[{place}]")
        if problem is not None:
            return problem
    return _order_problem([message["role"] for message in messages])


def _without_messages(row: dict[str, Any], *, others_are_chat: bool) -> Problem:
    if any(key in row for key in _PREFERENCE):
        message = "expected a chat row, found a row of preference data"
        return _problem("wrong_task_format", "", message, "Use this file for a job that learns preferences.")
    if others_are_chat and "prompt" in row:
        message = "expected a chat row as the rows before it are, found a prompt and completion"
        return _problem("mixed_formats", "", message, "Use one format in a file.")
    hint = 'Write {"messages": [{"role": "user", "content": "…"}, {"role": "assistant", "content": "…"}]}.'
    return _problem("missing_messages", "messages", "expected the key messages, found none", hint)


def _message_problem(message: Any, path: str) -> Problem | None:
    if not isinstance(message, dict):
        return _wrong_type(path, "an object", message)
    role = message.get("role")
    if not isinstance(role, str):
        return _wrong_type(f"{path}.role", "a text", role, is_there="role" in message)
    if role not in ROLES:
        hint = "Rename the role; roles of other formats are human for user and gpt for assistant."
        return _problem("unknown_role", f"{path}.role", f"expected {', '.join(ROLES)}, found {shown(role)}", hint)
    return _content_problem(message, path) or _weight_problem(message, path) or _key_problem(message, path)


def _content_problem(message: dict[str, Any], path: str) -> Problem | None:
    content = message.get("content")
    if isinstance(content, list):
        part = content[0].get("type") if content and isinstance(content[0], dict) else None
        found = f"a part of type {shown(part)}" if isinstance(part, str) else "a list of parts"
        hint = "Write the content as one text."
        place = f"{path}.content[0]" if content else f"{path}.content"
        return _problem("unsupported_content_part", place, f"expected a text, found {found}", hint)
    if not isinstance(content, str):
        return _wrong_type(f"{path}.content", "a text", content, is_there="content" in message)
    return None


def _weight_problem(message: dict[str, Any], path: str) -> Problem | None:
    if "weight" not in message:
        return None
    weight, place = message["weight"], f"{path}.weight"
    if message["role"] != "assistant":
        return _problem("invalid_weight", place, "expected a weight on assistant messages only", "Leave it out.")
    if isinstance(weight, bool) or not isinstance(weight, int) or weight not in (0, 1):
        found = repr(weight)[:20] if isinstance(weight, (int, float)) else kind(weight)
        return _problem("invalid_weight", place, f"expected 0 or 1, found {found}", "1 trains the message, 0 does not.")
    return None


def _key_problem(message: dict[str, Any], path: str) -> Problem | None:
    for key in message:
        if key not in _MESSAGE_KEYS:
            found = f"expected role, content and weight, found {shown(key)}"
            return _problem("unknown_field", path, found, "Leave it out: it would not be trained.")
    return None


def _order_problem(roles: list[str]) -> Problem | None:
    if not roles or roles[-1] != "assistant":
        found = roles[-1] if roles else "no message"
        message = f"expected the last message to be the assistant's, found {found}"
        return _problem("last_message_not_assistant", "messages", message, "End the row with what is to be learned.")
    if "system" in roles[1:]:
        path = f"messages[{roles.index('system', 1)}].role"
        return _problem("role_order", path, "expected a system message in the first place only", "Move or merge it.")
    if "user" not in roles[: roles.index("assistant")]:
        message = "expected a user message before the first assistant message, found none"
        return _problem("no_user_message", "messages", message, "Begin with what the assistant answers to.")
    return None


def kind(value: Any) -> str:
    return _KINDS.get(type(value), "an object")


def _wrong_type(path: str, expected: str, value: Any, *, is_there: bool = True) -> Problem:
    found = kind(value) if is_there else "nothing"
    return _problem("wrong_type", path, f"expected {expected}, found {found}", f"Write {expected} there.")


def _problem(code: str, path: str, message: str, hint: str) -> Problem:
    return Problem(code=code, path=path, message=message, hint=hint)
