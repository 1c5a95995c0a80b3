"""What a benchmark answers with, and where it is kept."""

from __future__ import annotations

import json
from dataclasses import asdict, dataclass
from pathlib import Path

RESULTS = Path(__file__).with_name("results.json")


@dataclass(frozen=True)
class Row:
    """`ratio` is what the bound is on; `ours` and `reference` are what it was made of, in `unit`."""

    name: str
    ours: float
    reference: float
    ratio: float
    unit: str
    runs: int
    note: str


@dataclass(frozen=True)
class Bound:
    """Of a ratio."""

    at_least: float = 0.0
    at_most: float = float("inf")

    def holds(self, ratio: float) -> bool:
        return self.at_least <= ratio <= self.at_most

    def __str__(self) -> str:
        return f"at most {self.at_most}" if self.at_least == 0.0 else f"at least {self.at_least}"


def append(row: Row, path: Path = RESULTS) -> None:
    rows = json.loads(path.read_text(encoding="utf-8")) if path.exists() else []
    lines = ",\n".join("  " + json.dumps(one) for one in [*rows, asdict(row)])
    path.write_text(f"[\n{lines}\n]\n", encoding="utf-8")
