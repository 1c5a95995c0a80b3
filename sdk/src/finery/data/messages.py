"""Lists of messages: what each may hold, and in which order they may come. Raises `RowError` with the first problem."""

from __future__ import annotations

from typing import Any

from finery.data.problems import MISSING, Place, RowError, is_clean, kind, text_of, wrong_type
from finery.data.strict_json import shown
from finery.data.tools import check_calls, read_calls

Message = dict[str, Any]
"""As templates see it: `role`; `content` (text; parts are joined; absent or null is ""); and only if the row has them
`reasoning_content`, `tool_calls` ([{"id"?, "type": "function", "function": {"name", "arguments": object}}]),
`tool_call_id`, `name`. `arguments` given as JSON text are parsed, so that templates print them alike. No key is added
that was not uploaded, and a key inside arguments or tool schemas that was uploaded as null stays null."""

ROLES = ("system", "developer", "user", "assistant", "tool")
REASONING = ("reasoning_content", "reasoning", "thinking")
"""Names of the same thing; templates see the first."""
_PLAIN_ROLES = frozenset({"system", "developer", "user", "assistant"})
_KEYS = {
    "assistant": frozenset({"role", "content", "weight", "tool_calls", *REASONING}),
    "tool": frozenset({"role", "content", "tool_call_id", "name"}),
}
_PLAIN_KEYS = frozenset({"role", "content"})
_OTHER_NAMES = {"human": "user", "gpt": "assistant", "bot": "assistant", "model": "assistant", "function": "tool"}
_REASONING_HINT = "Keep one of them; they are names of the same thing."


def read_messages(value: Any, path: str) -> tuple[list[Message], set[int]]:
    """The messages as templates see them, and the places of those with weight 0."""
    if not isinstance(value, list):
        raise wrong_type(path, "a list of messages", value)
    messages: list[Message] = []
    untrained: set[int] = set()
    for place, given in enumerate(value):
        if not _is_plain(given):
            given = _message(given, f"{path}[{place}]", place)
            if given.pop("weight", 1) == 0:
                untrained.add(place)
        messages.append(given)
    return messages, untrained


def _is_plain(message: Any) -> bool:
    """Whether it is a role and a text: most are, and then nothing else needs to be looked at."""
    if type(message) is not dict or len(message) != 2:
        return False
    role, content = message.get("role"), message.get("content")
    if type(role) is not str or role not in _PLAIN_ROLES or type(content) is not str:
        return False
    return is_clean(content)


def _message(given: Any, path: str, place: int) -> Message:
    if not isinstance(given, dict):
        raise wrong_type(path, "an object", given)
    role = _role(given, path)
    message: Message = {"role": role}
    calls = read_calls(given["tool_calls"], f"{path}.tool_calls") if _has(given, "tool_calls", role) else []
    message["content"] = _content(given, path, place, may_be_null=bool(calls))
    if (weight := _weight(given, path, role)) is not None:
        message["weight"] = weight
    _check_keys(given, path, role)
    if (reasoning := _reasoning(given, path)) is not None:
        message["reasoning_content"] = reasoning
    if calls:
        message["tool_calls"] = calls
    for key in ("tool_call_id", "name"):
        if given.get(key) is not None:
            message[key] = text_of(given[key], f"{path}.{key}")
    return message


def _has(given: dict[str, Any], key: str, role: str) -> bool:
    return role == "assistant" and given.get(key) is not None


def _role(given: dict[str, Any], path: str) -> str:
    role = given.get("role", MISSING)
    if not isinstance(role, str):
        hint = "Rename from to role, and value to content." if "from" in given else None
        raise wrong_type(f"{path}.role", "a text", role, hint)
    if role in ROLES:
        return role
    other = _OTHER_NAMES.get(role.lower(), role.lower() if role.lower() in ROLES else None)
    hint = f"Rename the role to {other}." if other else "Rename the role; human is user here, and gpt is assistant."
    raise RowError("unknown_role", f"{path}.role", f"expected {', '.join(ROLES)}, found {shown(role)}", hint)


def _content(given: dict[str, Any], path: str, place: int, *, may_be_null: bool) -> str:
    content = given.get("content", MISSING)
    if isinstance(content, list):
        return "".join(_part(part, f"{path}.content[{n}]", place, n) for n, part in enumerate(content))
    if may_be_null and (content is None or content is MISSING):
        return ""
    return text_of(content, f"{path}.content", "a text or a list of text parts")


def _part(part: Any, path: str, message: int, n: int) -> str:
    sort = part.get("type", MISSING) if isinstance(part, dict) else part
    if not isinstance(part, dict) or sort != "text":
        found = f"one of type {shown(sort)}" if isinstance(part, dict) and isinstance(sort, str) else kind(part)
        said = f"message {message}, part {n}: expected a part of type 'text', found {found}"
        raise RowError("unsupported_content_part", path, said, 'Leave it out, or write {"type": "text", "text": "…"}.')
    for key, value in part.items():
        if key not in ("type", "text") and value is not None:
            raise RowError("unknown_field", path, f"expected type and text, found {shown(key)}", "Leave it out.")
    return text_of(part.get("text", MISSING), f"{path}.text")


def _weight(given: dict[str, Any], path: str, role: str) -> int | None:
    if "weight" not in given:
        return None
    weight, place = given["weight"], f"{path}.weight"
    if role != "assistant":
        raise RowError("invalid_weight", place, "expected a weight on assistant messages only", "Leave it out.")
    if type(weight) is not int or weight not in (0, 1):
        found = repr(weight)[:20] if isinstance(weight, (int, float)) else kind(weight)
        raise RowError("invalid_weight", place, f"expected 0 or 1, found {found}", "1 trains the message, 0 does not.")
    return weight


def _check_keys(given: dict[str, Any], path: str, role: str) -> None:
    allowed = _KEYS.get(role, _PLAIN_KEYS)
    for key, value in given.items():
        if key in allowed or value is None or value == []:
            continue  # what is empty says nothing
        names = [name for name in ("role", "content", "weight", "tool_calls", REASONING[0]) if name in allowed]
        names += [name for name in ("tool_call_id", "name") if name in allowed]
        found = f"expected {', '.join(names)} in a message of role {role}, found {shown(str(key))}"
        raise RowError("unknown_field", path, found, "Leave it out: it would not be trained.")


def _reasoning(given: dict[str, Any], path: str) -> str | None:
    found = [key for key in REASONING if given.get(key) is not None]
    if len(found) > 1:
        raise RowError("duplicate_key", path, f"expected one of {' and '.join(found)}, found both", _REASONING_HINT)
    return text_of(given[found[0]], f"{path}.{found[0]}") if found else None


def check_order(messages: list[Message], place: Place) -> None:
    """The rules that every template can live with; nothing is merged or moved to meet them."""
    if not messages or messages[-1]["role"] != "assistant":
        found = messages[-1]["role"] if messages else "no message"
        message = f"expected the last message to be the assistant's, found {found}"
        path = place(len(messages) - 1).partition("[")[0]
        raise RowError("last_message_not_assistant", path, message, "End the row with what is to be learned.")
    check_conversation(messages, place)


def check_conversation(messages: list[Message], place: Place) -> None:
    """Those that a prompt has to meet as well, wherever it ends."""
    roles = [message["role"] for message in messages]
    for n, role in enumerate(roles):
        if n and role in ("system", "developer"):
            message = f"expected a {role} message in the first place only"
            raise RowError("role_order", f"{place(n)}.role", message, "Move or merge it.")
    first = roles.index("assistant") if "assistant" in roles else len(roles)
    if "user" not in roles[:first]:
        message = "expected a user message before the first assistant message, found none"
        path = place(0).partition("[")[0]
        raise RowError("no_user_message", path, message, "Begin with what the assistant answers to.")
    if "tool" in roles or any("tool_calls" in message for message in messages):
        check_calls(messages, place)


def check_prompt_end(
    messages: list[Message], place: Place, hint: str = "End the prompt with what is to be answered."
) -> None:
    """A prompt waits for an answer."""
    last = messages[-1]["role"] if messages else "no message"
    if last not in ("user", "tool"):
        message = f"expected the prompt to end with a user's or a tool's message, found {last}"
        path = place(len(messages) - 1) if messages else place(0).partition("[")[0]
        raise RowError("last_message_not_user", path, message, hint)
