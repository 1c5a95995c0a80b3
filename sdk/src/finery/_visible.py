"""Text of customers and models on a screen: it is data, and never reaches a terminal or a page as commands.

Line ends show as ⏎, other control characters as their Unicode pictures (␛) or code points (<U+202E>).
"""

from __future__ import annotations

import os
import re
import sys
from html import escape

BOLD, RED, DIM, RESET = "\x1b[1m", "\x1b[31m", "\x1b[2m", "\x1b[0m"
# C0, DEL, C1, and what turns the direction of text or cannot be seen. Joiners stay: scripts and emoji need them.
_HIDDEN = re.compile(r"[\x00-\x1f\x7f-\x9f\u00ad\u061c\u200b\u200e\u200f\u2028-\u202e\u2060-\u2069\ufeff\ud800-\udfff]")


def wants_colour() -> bool:
    """The standard output is a terminal, and nobody said no (https://no-color.org)."""
    if os.environ.get("NO_COLOR") or os.environ.get("TERM") == "dumb":
        return False
    return sys.stdout is not None and sys.stdout.isatty()


def document(title: str, fragment: str) -> str:
    """The fragment as a page of its own, which forbids scripts and loads on top."""
    policy = "default-src 'none'; style-src 'unsafe-inline'"
    return (
        f'<!doctype html><html lang="en"><head><meta charset="utf-8"><title>{escaped(title)}</title>'
        f'<meta http-equiv="Content-Security-Policy" content="{policy}"></head>'
        f"<body>{fragment}</body></html>\n"
    )


def escaped(words: str) -> str:
    """For HTML, attributes in double quotes included."""
    return escape(visible(words))


def visible(words: str) -> str:
    """What would command a terminal as a picture of it; line ends stay, behind a ⏎."""
    return _HIDDEN.sub(lambda found: _picture(found[0]), words)


def lines(words: str) -> str:
    """The same for text of several lines, such as a traceback: their ends need no mark."""
    return "\n".join(map(visible, words.rstrip("\n").split("\n")))


def one_line(words: str, longest: int) -> str:
    """For a table: on one line, cut where it is longer."""
    cut = words if len(words) <= longest else f"{words[: longest - 1]}…"
    return visible(cut).replace("\n", " ").rstrip()


def _picture(character: str) -> str:
    code = ord(character)
    if character == "\n":
        return "⏎\n"
    if code < 0x20:
        return chr(0x2400 + code)
    if code == 0x7F:
        return "␡"
    return f"<U+{code:04X}>"
