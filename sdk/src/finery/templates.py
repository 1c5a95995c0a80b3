"""Texts of graders with places to fill in: `{{ item.answer }}`, `{{ sample.output_text }}`.

A place names a field, and with dots and `[0]` something inside it; nothing is computed, and what was filled in is not
looked at again. `item` is the prompt's row; of `sample` there is `output_text`, the answer. All other text stays as it
is. Pure.
"""

from __future__ import annotations

import json
import re
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

Step = str | int
SAMPLE_FIELDS = ("output_text",)
MAX_PLACES = 256
"""Of one template."""

_PATH = re.compile(r"\s*([A-Za-z_]\w*)((?:\.[A-Za-z_][\w-]*|\.\d{1,9}|\[\d{1,9}\])*)\s*", re.ASCII)
_STEP = re.compile(r"\.?([A-Za-z_][\w-]*|\d+)|\[(\d+)\]", re.ASCII)


class TemplateError(ValueError):
    """No template; the message says what and where."""


class MissingFieldError(LookupError):
    """The row has not got what a place names."""

    def __init__(self, path: str, found: str) -> None:
        super().__init__(f"expected {path}, found {found}")
        self.path = path
        """As in `item.answer`."""


@dataclass(frozen=True, slots=True)
class Place:
    """What is filled in."""

    namespace: str
    """`item` or `sample`."""
    steps: tuple[Step, ...]
    """Names of fields and places in lists, from the outside in."""

    def __str__(self) -> str:
        return self.namespace + "".join(f"[{step}]" if isinstance(step, int) else f".{step}" for step in self.steps)


@dataclass(frozen=True, slots=True)
class Template:
    parts: tuple[str | Place, ...]


def parse(text: str) -> Template:
    """Raises `TemplateError` for a place that is not closed, names nothing, or names something unknown."""
    parts: list[str | Place] = []
    count = end = 0
    while (start := text.find("{{", end)) >= 0:
        close = text.find("}}", start)
        if close < 0:
            raise TemplateError(f"expected '}}}}' after '{{{{' at character {start + 1}, found none")
        parts += [text[end:start]] if start > end else []
        parts.append(_place(text[start + 2 : close], start + 1))
        end, count = close + 2, count + 1
        if count > MAX_PLACES:
            raise TemplateError(f"expected at most {MAX_PLACES} places to fill in, found more")
    return Template((*parts, text[end:]) if end < len(text) else tuple(parts))


def render(template: Template, item: Mapping[str, Any], sample: Mapping[str, Any]) -> str:
    """The text. Texts are filled in as they are, everything else as JSON.

    Raises `MissingFieldError` for what the row has not got: an absent field, not one that is null.
    """
    roots = {"item": item, "sample": sample}
    return "".join(
        part if isinstance(part, str) else _text(_at(part, roots[part.namespace])) for part in template.parts
    )


def _place(inside: str, at: int) -> Place:
    match = _PATH.fullmatch(inside)
    where = f"{inside.strip()[:40]!r} at character {at}"
    if match is None:
        raise TemplateError(f"expected a field as in '{{{{ item.answer }}}}', found {where}")
    namespace = match[1]
    steps = tuple(_step(found[0] or found[1]) for found in _STEP.findall(match[2]))
    if namespace not in ("item", "sample"):
        raise TemplateError(f"expected item (the prompt's row) or sample (the answer), found {where}")
    if namespace == "sample" and (len(steps) != 1 or steps[0] not in SAMPLE_FIELDS):
        raise TemplateError(f"expected sample.{', sample.'.join(SAMPLE_FIELDS)}, found {where}")
    if not steps:
        raise TemplateError(f"expected a field of item, as in '{{{{ item.answer }}}}', found {where}")
    return Place(namespace, steps)


def _step(text: str) -> Step:
    return int(text) if text.isdigit() else text


def _at(place: Place, value: Any) -> Any:
    for depth, step in enumerate(place.steps):
        here = Place(place.namespace, place.steps[: depth + 1])
        if isinstance(value, Mapping):
            key = str(step)  # `.0` may be a field's name
            if key not in value:
                raise MissingFieldError(str(here), "no such field in the row")
            value = value[key]
        elif isinstance(value, list) and isinstance(step, int):
            if step >= len(value):
                raise MissingFieldError(str(here), f"a list of {len(value)}")
            value = value[step]
        else:
            raise MissingFieldError(str(here), "a value that has no fields")
    return value


def _text(value: Any) -> str:
    return value if isinstance(value, str) else json.dumps(value, ensure_ascii=False)
