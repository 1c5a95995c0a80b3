"""The model's chat template, and what is wrong with a row.

The only Jinja environment of the workers is here: sandboxed, immutable, its input and output limited in size. It is not
limited in time; who renders foreign templates does so in a process that can be killed (`data/render.py`).
"""

from __future__ import annotations

import hashlib
import json
import re
from collections.abc import Callable, Sequence
from datetime import datetime
from pathlib import Path
from typing import Any, NoReturn

from jinja2 import TemplateError, TemplateSyntaxError, nodes
from jinja2.exceptions import SecurityError
from jinja2.ext import Extension
from jinja2.parser import Parser
from jinja2.sandbox import ImmutableSandboxedEnvironment

from finery.data.messages import REASONING, Message
from finery.types.errors import Problem
from finery_gpu_workers.data.folder import read_json, special_tokens
from finery_gpu_workers.errors import WorkerError

MAX_TEMPLATE_BYTES = 512 * 1024
MAX_RENDERED_CHARACTERS = 32 * 1024 * 1024
_LONGEST_MESSAGE = 300
_REASONING = REASONING[0]
_ROW_ERRORS = (TemplateError, ArithmeticError, AttributeError, LookupError, RecursionError, TypeError, ValueError)


class RowError(Exception):
    """One row that cannot be used: a stable code, the place inside the row, a sentence, what to do."""

    def __init__(self, code: str, message: str, *, path: str = "", hint: str = "") -> None:
        super().__init__(message)
        self.code = code
        self.message = message
        self.path = path
        self.hint = hint

    def problem(self, line: int) -> Problem:
        return Problem(line=line, path=self.path, code=self.code, message=self.message, hint=self.hint)


class _Generation(Extension):
    """`{% generation %}…{% endgeneration %}` renders its body; our masks do not need the marks."""

    tags = {"generation"}

    def parse(self, parser: Parser) -> list[nodes.Node]:
        next(parser.stream)
        return list(parser.parse_statements(("name:endgeneration",), drop_needle=True))


def _refuse(message: str) -> NoReturn:
    """The `raise_exception` that templates call on rows they do not take."""
    raise RowError("template_error", f"the model's chat template refuses the row: {message}"[:_LONGEST_MESSAGE])


def _to_json(
    value: Any,
    ensure_ascii: bool = False,
    indent: int | None = None,
    separators: tuple[str, str] | None = None,
    sort_keys: bool = False,
) -> str:
    """As in transformers: keys in their order, characters as they are, no HTML escapes."""
    return json.dumps(value, ensure_ascii=ensure_ascii, indent=indent, separators=separators, sort_keys=sort_keys)


class Template:
    """A model's chat template. `now` is what `strftime_now` shows; `on_render` is called behind every text."""

    def __init__(
        self,
        source: str,
        special_tokens: dict[str, str],
        now: datetime,
        on_render: Callable[[], None] = lambda: None,
    ) -> None:
        if len(source.encode()) > MAX_TEMPLATE_BYTES:
            raise _invalid(f"expected at most {MAX_TEMPLATE_BYTES} bytes, found {len(source.encode())}")
        environment = ImmutableSandboxedEnvironment(
            trim_blocks=True,
            lstrip_blocks=True,
            extensions=[_Generation, "jinja2.ext.loopcontrols"],
        )
        del environment.filters["random"], environment.globals["lipsum"]  # the same job must give the same data
        environment.filters["tojson"] = _to_json
        environment.globals |= {"raise_exception": _refuse, "strftime_now": now.strftime}
        try:
            self._template = environment.from_string(source)
        except (TemplateSyntaxError, SecurityError, MemoryError, OverflowError, RecursionError) as error:
            raise _invalid(f"it does not compile: {error}") from None
        self._template.globals = dict(self._template.globals)  # it is copied at every rendering; a ChainMap slowly
        self._context = {**special_tokens, "documents": None}
        self._on_render = on_render
        self._reasoning = _reasoning_key(source)
        self.endings: list[str] = []
        """What it has been found to write behind an assistant message, longest first (see `data/turns.py`)."""
        self.takes_tools: bool | None = None
        """Whether it writes the tools of a row anywhere; None before the first row with tools."""

    @classmethod
    def load(cls, folder: Path, now: datetime, on_render: Callable[[], None] = lambda: None) -> Template:
        """The template of a model folder in the transformers layout."""
        return cls(template_source(folder), special_tokens(folder), now, on_render)

    def render(self, messages: Sequence[Message], *, prompt: bool = False, tools: Sequence[Any] | None = None) -> str:
        """The conversation as text; with `prompt` the header of the assistant's next turn is added."""
        values = {
            "messages": [self._named(message) for message in messages],
            "tools": list(tools) if tools else None,
            "add_generation_prompt": prompt,
        }
        pieces: list[str] = []
        size = 0
        try:
            for piece in self._template.generate(self._context, **values):
                pieces.append(piece)
                size += len(piece)
                if size > MAX_RENDERED_CHARACTERS:
                    raise _invalid(f"expected at most {MAX_RENDERED_CHARACTERS} characters for a row, found more")
        except (RowError, WorkerError):
            raise
        except (SecurityError, MemoryError, OverflowError) as error:
            raise _invalid(f"{type(error).__name__}: {error}") from None
        except _ROW_ERRORS as error:
            message = f"the model's chat template fails on the row: {error}"[:_LONGEST_MESSAGE]
            raise RowError("template_error", message) from None
        self._on_render()
        return "".join(pieces)

    def _named(self, message: Message) -> Message:
        """With reasoning under the name that the template knows."""
        if self._reasoning == _REASONING or _REASONING not in message:
            return message
        return {self._reasoning if key == _REASONING else key: value for key, value in message.items()}


def _reasoning_key(source: str) -> str:
    """What the template calls the reasoning of a message: `reasoning_content`, or as in gpt-oss `thinking`."""
    names = (name for name in REASONING if re.search(rf"(?:\.|['\"]){name}\b", source))
    return next(names, _REASONING)


def _invalid(message: str) -> WorkerError:
    return WorkerError("invalid_chat_template", f"The model's chat template cannot be used: {message}"[:500])


def template_source(folder: Path) -> str:
    """The text of the chat template: `chat_template.jinja`, else the one in `tokenizer_config.json`."""
    file = folder / "chat_template.jinja"
    source = (
        file.read_bytes().decode()
        if file.exists()
        else read_json(folder / "tokenizer_config.json").get("chat_template")
    )
    if isinstance(source, list):  # several, by name
        source = next((entry["template"] for entry in source if entry.get("name") == "default"), None)
    if not isinstance(source, str):
        raise _invalid("expected chat_template.jinja or a template in tokenizer_config.json, found neither")
    return source


def template_sha256(folder: Path) -> str:
    return hashlib.sha256(template_source(folder).encode()).hexdigest()
