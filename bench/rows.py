"""What a benchmark answers with, and where it is kept."""

from __future__ import annotations

import json
from dataclasses import asdict, dataclass
from pathlib import Path

RESULTS = Path(__file__).with_name("results.json")


@dataclass(frozen=True)
class Row:
    """`ratio` is what the limit is on; `ours` and `reference` are what it was made of, in `unit`."""

    name: str
    ours: float
    reference: float
    ratio: float
    unit: str
    runs: int
    note: str


def append(row: Row, path: Path = RESULTS) -> None:
    rows = json.loads(path.read_text(encoding="utf-8")) if path.exists() else []
    lines = ",\n".join("  " + json.dumps(one) for one in [*rows, asdict(row)])
    path.write_text(f"[\n{lines}\n]\n", encoding="utf-8")
