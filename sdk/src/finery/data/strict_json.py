"""JSON as the standard has it: no NaN or Infinity, no overflowing numbers, no duplicate keys, no half characters.

Python's own reader accepts all of these without a word. Here they are found and named with their place.
"""

from __future__ import annotations

import hashlib
import json
import math
import re
from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

Path = tuple[str | int, ...]
_LONGEST_PATH = 300
MAX_NESTING = 100
"""Of lists and objects inside each other, where a value is shown again: readers of JSON stop at 200 or so."""
_SUSPICIOUS = re.compile(r"\\u(?:0000|[dD][89a-fA-F])")
"""Half characters and U+0000 can only come in as escapes."""


@dataclass(frozen=True)
class Flaw:
    """Something that no JSON for us may hold."""

    path: Path
    code: str
    """invalid_json, duplicate_key, invalid_unicode or nul_character."""
    message: str


@dataclass(frozen=True)
class _Mark:
    """Stands in the parsed value where a flaw was read; the reader's hooks do not know the place."""

    code: str
    message: str


class StrictReader:
    """Reads JSON texts one after the other."""

    def __init__(self) -> None:
        self._marked = False
        self._decoder = json.JSONDecoder(
            object_pairs_hook=self._object, parse_constant=self._constant, parse_float=self._float
        )

    def read(self, text: str) -> tuple[Any, list[Flaw]]:
        """The value and what is wrong with it, in the order of the text.

        Raises ValueError, with a position, if `text` is not JSON or is nested too deep.
        """
        self._marked = False
        try:
            value = self._decoder.decode(text)
            suspicious = self._marked or ("\\u" in text and _SUSPICIOUS.search(text))
            return value, list(flaws(value)) if suspicious else []
        except RecursionError:
            raise ValueError("expected JSON that is nested less deep") from None
        except json.JSONDecodeError:
            raise
        except ValueError:  # the only other one that Python's reader has
            raise ValueError("expected numbers of a few thousand digits at most, found a longer one") from None

    def _mark(self, code: str, message: str) -> _Mark:
        self._marked = True
        return _Mark(code, message)

    def _object(self, pairs: list[tuple[str, Any]]) -> dict[str, Any]:
        value = dict(pairs)
        if len(value) < len(pairs):
            counts = Counter(key for key, _ in pairs)  # a row may hold a million keys
            for key in (key for key, count in counts.items() if count > 1):
                value[key] = self._mark("duplicate_key", f"the key {shown(key)} occurs more than once; keep one")
        return value

    def _constant(self, text: str) -> _Mark:
        return self._mark("invalid_json", f"expected a number, found {text}, which JSON does not have")

    def _float(self, text: str) -> float | _Mark:
        value = float(text)
        if math.isfinite(value):
            return value
        return self._mark("invalid_json", f"expected a finite number, found {text[:40]}, which is out of range")


def flaws(value: Any, path: Path = ()) -> Iterator[Flaw]:
    """What in a parsed value no JSON for us may hold. Raises RecursionError if it is nested too deep."""
    if isinstance(value, _Mark):
        yield Flaw(path, value.code, value.message)
    elif isinstance(value, str):
        yield from _text_flaws(value, path)
    elif isinstance(value, dict):
        for key, item in value.items():
            yield from _text_flaws(key, path) if isinstance(key, str) else _no_json(key, path)
            yield from flaws(item, (*path, key if isinstance(key, str) else str(key)))
    elif isinstance(value, list):
        for place, item in enumerate(value):
            yield from flaws(item, (*path, place))
    elif isinstance(value, float):
        if not math.isfinite(value):
            yield Flaw(path, "invalid_json", f"expected a finite number, found {value}")
    elif value is not None and not isinstance(value, int):
        yield from _no_json(value, path)


def is_too_deep(value: Any) -> bool:
    """Whether lists and objects lie more than `MAX_NESTING` deep inside each other."""
    level = [value]
    for _ in range(MAX_NESTING + 1):
        inside = [item.values() if isinstance(item, dict) else item for item in level if isinstance(item, dict | list)]
        level = [item for items in inside for item in items]
        if not level:
            return False
    return True


def _no_json(value: Any, path: Path) -> Iterator[Flaw]:
    yield Flaw(path, "invalid_json", f"expected a value that JSON has, found a {type(value).__name__}")


def _text_flaws(text: str, path: Path) -> Iterator[Flaw]:
    if "\0" in text:
        yield Flaw(path, "nul_character", "expected text without the character U+0000, found one; remove it")
    try:
        text.encode()
    except UnicodeEncodeError as error:
        half = f"\\u{ord(text[error.start]):04x}"
        yield Flaw(path, "invalid_unicode", f"expected whole characters, found half a surrogate pair, {half}")


def dotted(path: Sequence[str | int]) -> str:
    """`("messages", 1, "content")` as `messages[1].content`; safe to print whatever the keys are, and short."""
    text = ""
    for part in path:
        text += f"[{part}]" if isinstance(part, int) else f".{printable(part)}"
        if len(text) > _LONGEST_PATH:
            text = f"{text[:_LONGEST_PATH]}…"
            break
    return text.removeprefix(".")


def printable(text: str, limit: int = 64) -> str:
    """`text`, cut, with everything escaped that may not be printed or encoded."""
    cut = text[:limit] + ("…" if len(text) > limit else "")
    return "".join(c if c.isprintable() else c.encode("unicode_escape").decode() for c in cut)


def shown(text: str) -> str:
    return f"'{printable(text)}'"


def canonical_sha256(value: Any) -> str:
    """The same for equal JSON, whatever the order of its keys and its white space."""
    text = json.dumps(value, sort_keys=True, separators=(",", ":"), ensure_ascii=True)
    return hashlib.sha256(text.encode()).hexdigest()
