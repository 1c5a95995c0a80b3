"""How alike two texts are, from 0 to 1."""

from __future__ import annotations

from collections.abc import Callable

METRICS: dict[str, Callable[[str, str], float]] = {}
