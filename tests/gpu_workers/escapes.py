"""Attempts to get out of the sandbox. Each takes `given` and returns what shows that it got out; what stops it raises,
or leaves nothing to return. All are bounded, so that they can be run outside the sandbox too, where they must succeed.

The modules `escapes_…` are sent into the sandbox as one text, so they import nothing but the standard library.
"""

from __future__ import annotations

import re
from pathlib import Path
from types import ModuleType

from . import escapes_common, escapes_files, escapes_network, escapes_processes, escapes_rights, escapes_served

_MODULES = (escapes_files, escapes_processes, escapes_network, escapes_rights)
_LOCAL = re.compile(r"^from (?:__future__|\.\S*) import (?:\([^)]*\)|.*)\n", re.MULTILINE)


def _attempts(module: ModuleType) -> list[str]:
    return [
        name
        for name, value in vars(module).items()
        if callable(value) and getattr(value, "__module__", "") == module.__name__ and not name.startswith("_")
    ]


ATTEMPTS = [name for module in _MODULES for name in _attempts(module)]


def source() -> str:
    """All of it as one text."""
    modules = (escapes_common, *_MODULES, escapes_served)
    texts = [_LOCAL.sub("", Path(str(module.__file__)).read_text("utf-8")) for module in modules]
    return "\n".join(["from __future__ import annotations", *texts])
