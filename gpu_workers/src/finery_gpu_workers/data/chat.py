"""Chat rows: strict parsing, rendering with the model's own template, and which characters carry loss.

The only Jinja environment of the workers is here: sandboxed, immutable, its input and output limited in size. It is not
limited in time; who renders foreign templates does so in a process that can be killed (`data/render.py`).
"""

from __future__ import annotations

import hashlib
import json
from dataclasses import dataclass
from datetime import datetime
from itertools import takewhile
from pathlib import Path
from typing import Any, NoReturn

from jinja2 import TemplateError, TemplateSyntaxError, nodes
from jinja2.exceptions import SecurityError
from jinja2.ext import Extension
from jinja2.parser import Parser
from jinja2.sandbox import ImmutableSandboxedEnvironment

from finery.types.methods import TrainOn
from finery_gpu_workers.errors import WorkerError

MAX_TEMPLATE_BYTES = 512 * 1024
MAX_RENDERED_CHARACTERS = 32 * 1024 * 1024
_KNOWN_ENDINGS = 16
ROLES = ("system", "user", "assistant")

Messages = list[dict[str, str]]


@dataclass(frozen=True)
class Row:
    messages: Messages
    """Role and content, as templates see them."""
    untrained: frozenset[int] = frozenset()
    """Places of assistant messages with weight 0."""


class RowError(Exception):
    """One row that cannot be used: a stable code, the place inside the row, a sentence, what to do."""

    def __init__(self, code: str, message: str, *, path: str = "", hint: str = "") -> None:
        super().__init__(message)
        self.code = code
        self.message = message
        self.path = path
        self.hint = hint


# ---- rows


def parse_row(line: bytes) -> Row:
    """One JSONL line, `{"messages": [{"role", "content", "weight"?}, …]}`. Raises RowError."""
    try:
        row = json.loads(line.decode("utf-8"), object_pairs_hook=_unique, parse_constant=_no_constant)
    except UnicodeDecodeError as error:
        raise RowError("invalid_utf8", f"expected UTF-8, found byte 0x{line[error.start]:02x}") from None
    except (ValueError, RecursionError) as error:
        raise RowError("invalid_json", f"expected one JSON object on the line: {error}"[:300]) from None
    if not isinstance(row, dict):
        raise RowError("not_an_object", f"expected a JSON object, found {type(row).__name__}")
    if "messages" not in row:
        raise RowError("missing_messages", 'expected the key "messages"', path="messages")
    messages = row["messages"]
    if not isinstance(messages, list):
        raise RowError("wrong_type", f"expected a list, found {type(messages).__name__}", path="messages")
    parsed = [_message(message, f"messages[{n}]") for n, message in enumerate(messages)]
    _check_order([message["role"] for message in parsed])
    return Row(parsed, frozenset(n for n, message in enumerate(messages) if message.get("weight") == 0))


def _unique(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    found = dict(pairs)
    if len(found) != len(pairs):
        raise RowError("duplicate_key", "expected every key once in an object, found one twice")
    return found


def _no_constant(name: str) -> NoReturn:
    raise ValueError(f"{name} is not JSON")


def _message(message: Any, path: str) -> dict[str, str]:
    if not isinstance(message, dict):
        raise RowError("wrong_type", f"expected an object, found {type(message).__name__}", path=path)
    for key in ("role", "content"):
        if not isinstance(message.get(key), str):
            found = type(message[key]).__name__ if key in message else "nothing"
            raise RowError("wrong_type", f"expected text, found {found}", path=f"{path}.{key}")
    if message["role"] not in ROLES:
        found = repr(message["role"][:40])
        raise RowError("unknown_role", f"expected one of {', '.join(ROLES)}, found {found}", path=f"{path}.role")
    if extra := sorted(set(message) - {"role", "content", "weight"}):
        raise RowError("unknown_field", f"expected role, content and weight, found {extra[0][:40]!r}", path=path)
    _check_weight(message, f"{path}.weight")
    try:
        message["content"].encode()
    except UnicodeEncodeError:
        raise RowError("invalid_unicode", "found half a surrogate pair", path=f"{path}.content") from None
    return {"role": message["role"], "content": message["content"]}


def _check_weight(message: dict[str, Any], path: str) -> None:
    if "weight" not in message:
        return
    weight = message["weight"]
    if message["role"] != "assistant" or type(weight) is not int or weight not in (0, 1):
        found = f"{str(weight)[:20]!r} on a message of role {message['role']}"
        raise RowError("invalid_weight", f"expected 0 or 1, on assistant messages only, found {found}", path=path)


def _check_order(roles: list[str]) -> None:
    if not roles or roles[-1] != "assistant":
        raise RowError("last_message_not_assistant", "expected the last message to be the assistant's", path="messages")
    if "system" in roles[1:]:
        place = f"messages[{roles.index('system', 1)}].role"
        raise RowError("role_order", "expected a system message only at the beginning", path=place)
    if "user" not in roles[: roles.index("assistant")]:
        raise RowError("no_user_message", "expected a user message before the first assistant message", path="messages")


# ---- the template


class _Generation(Extension):
    """`{% generation %}…{% endgeneration %}` renders its body; our masks do not need the marks."""

    tags = {"generation"}

    def parse(self, parser: Parser) -> list[nodes.Node]:
        next(parser.stream)
        return list(parser.parse_statements(("name:endgeneration",), drop_needle=True))


def _refuse(message: str) -> NoReturn:
    """The `raise_exception` that templates call on rows they do not take."""
    raise RowError("template_error", f"the model's chat template refuses the row: {message}"[:300])


def _to_json(value: Any, indent: int | None = None) -> str:
    return json.dumps(value, ensure_ascii=False, indent=indent)


class Template:
    """A model's chat template. `now` is what `strftime_now` shows."""

    def __init__(self, source: str, special_tokens: dict[str, str], now: datetime) -> None:
        if len(source.encode()) > MAX_TEMPLATE_BYTES:
            raise _invalid(f"expected at most {MAX_TEMPLATE_BYTES} bytes, found {len(source.encode())}")
        environment = ImmutableSandboxedEnvironment(
            trim_blocks=True, lstrip_blocks=True, extensions=[_Generation, "jinja2.ext.loopcontrols"]
        )
        environment.filters["tojson"] = _to_json
        environment.globals |= {"raise_exception": _refuse, "strftime_now": now.strftime}
        try:
            self._template = environment.from_string(source)
        except (TemplateSyntaxError, SecurityError, MemoryError, OverflowError, RecursionError) as error:
            raise _invalid(f"it does not compile: {error}") from None
        self._context = {**special_tokens, "tools": None, "documents": None}
        self.endings: list[str] = []
        """What it has been found to write behind an assistant message, longest first."""

    @classmethod
    def load(cls, folder: Path, now: datetime) -> Template:
        """The template of a model folder in the transformers layout."""
        return cls(template_source(folder), _special_tokens(folder), now)

    def render(self, messages: Messages, *, prompt: bool = False) -> str:
        """The conversation as text; with `prompt` the header of the assistant's next turn is added."""
        pieces: list[str] = []
        size = 0
        try:
            for piece in self._template.generate(messages=messages, add_generation_prompt=prompt, **self._context):
                pieces.append(piece)
                size += len(piece)
                if size > MAX_RENDERED_CHARACTERS:
                    raise _invalid(f"expected at most {MAX_RENDERED_CHARACTERS} characters for a row, found more")
        except (RowError, WorkerError):
            raise
        except (SecurityError, MemoryError, OverflowError) as error:
            raise _invalid(f"{type(error).__name__}: {error}") from None
        except (TemplateError, ArithmeticError, AttributeError, LookupError, TypeError, ValueError) as error:
            raise RowError("template_error", f"the model's chat template fails on the row: {error}"[:300]) from None
        return "".join(pieces)


def _invalid(message: str) -> WorkerError:
    return WorkerError("invalid_chat_template", f"The model's chat template cannot be used: {message}"[:500])


def template_source(folder: Path) -> str:
    """The text of the chat template: `chat_template.jinja`, else the one in `tokenizer_config.json`."""
    file = folder / "chat_template.jinja"
    source = (
        file.read_bytes().decode() if file.exists() else _json(folder / "tokenizer_config.json").get("chat_template")
    )
    if isinstance(source, list):  # several, by name
        source = next((entry["template"] for entry in source if entry.get("name") == "default"), None)
    if not isinstance(source, str):
        raise _invalid("expected chat_template.jinja or a template in tokenizer_config.json, found neither")
    return source


def template_sha256(folder: Path) -> str:
    return hashlib.sha256(template_source(folder).encode()).hexdigest()


def _special_tokens(folder: Path) -> dict[str, str]:
    """`bos_token` and the like, as templates expect them."""
    settings = _json(folder / "special_tokens_map.json") | _json(folder / "tokenizer_config.json")
    found = {key: value for key, value in settings.items() if key.endswith("_token")}
    texts = {key: value["content"] if isinstance(value, dict) else value for key, value in found.items()}
    return {key: value for key, value in texts.items() if isinstance(value, str)}


def _json(file: Path) -> dict[str, Any]:
    content: dict[str, Any] = json.loads(file.read_text("utf-8")) if file.exists() else {}
    return content


# ---- what is trained


@dataclass(frozen=True)
class Turn:
    """An assistant turn, as character positions in the row's text."""

    start: int
    """End of the generation prompt: what the model would be given when it generates."""
    content_end: int
    """Where the message ends; the end-of-turn token is the first special token from here."""
    end: int


@dataclass(frozen=True)
class Rendered:
    text: str
    turns: tuple[Turn, ...]
    """Those that carry loss; or, with `everything`, those that do not."""
    everything: bool = False
    """All tokens carry loss, but for `turns`."""


def render_row(template: Template, row: Row, train_on: TrainOn) -> Rendered:
    """Text and trained turns. Raises RowError where a turn's prompt is not a strict prefix of the conversation."""
    text = template.render(row.messages)
    answers = [n for n, message in enumerate(row.messages) if message["role"] == "assistant"]
    wanted = answers[-1:] if train_on == "last" else answers
    marked = [n for n in wanted if (n in row.untrained) == (train_on == "all")]
    turns = tuple(_turn(template, row.messages, n, text) for n in marked)
    return Rendered(text, turns, everything=train_on == "all")


def _turn(template: Template, messages: Messages, n: int, text: str) -> Turn:
    prompt = template.render(messages[:n], prompt=True)
    until = text if n == len(messages) - 1 else template.render(messages[: n + 1])
    if not until.startswith(prompt) or len(until) == len(prompt) or not text.startswith(until):
        raise not_a_prefix(n)
    ending = _ending(template, messages, n, until)
    return Turn(len(prompt), max(len(prompt), len(until) - len(ending)), len(until))


def _ending(template: Template, messages: Messages, n: int, until: str) -> str:
    """What the template writes behind the message: what stays the same when the message is another one.

    To look for the content instead would find it in what the template itself writes in front of it.
    """
    content = messages[n]["content"]
    for ending in template.endings:
        if until.endswith((content + ending, content.strip() + ending)):
            return ending
    other = messages[n] | {"content": "y" if content.rstrip().endswith("x") else "x"}
    pairs = zip(reversed(until), reversed(template.render([*messages[:n], other])), strict=False)
    same = sum(1 for _ in takewhile(lambda pair: pair[0] == pair[1], pairs))
    ending = until[len(until) - same :]
    if ending not in template.endings and len(template.endings) < _KNOWN_ENDINGS:
        template.endings.append(ending)
        template.endings.sort(key=len, reverse=True)
    return ending


def not_a_prefix(n: int | None = None) -> RowError:
    """The prompt as it is at generation does not continue into the row: a mask would be wrong."""
    return RowError(
        "prompt_not_prefix",
        "expected the prompt of the assistant's turn to be a strict prefix of the rendered row, found other text",
        path="messages" if n is None else f"messages[{n}]",
        hint="remove white space at the start of the content; or train on the last turn only",
    )
