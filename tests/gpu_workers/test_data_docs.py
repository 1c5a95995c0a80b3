"""docs/data.md lists what preparation finds: every code, and no other."""

from __future__ import annotations

import re
from pathlib import Path

import finery_gpu_workers.data
from finery_gpu_workers.data import statistics

ROOT = Path(__file__).parents[2]
PAGE = (ROOT / "docs/data.md").read_text(encoding="utf-8")
SOURCE = "".join(
    path.read_text(encoding="utf-8") for path in Path(finery_gpu_workers.data.__file__).parent.glob("*.py")
)


def listed(heading: str) -> list[str]:
    section = PAGE.partition(f"## {heading}\n")[2].partition("\n## ")[0]
    return re.findall(r"^\| `([a-z_]+)` \|", section, re.MULTILINE)


def test_codes_of_rows_are_documented() -> None:
    made = set(re.findall(r'RowError\(\s*"([a-z_]+)"', SOURCE)) | {"train_on_not_possible"}
    assert 'WorkerError("train_on_not_possible"' in SOURCE
    assert len(made) > 5
    assert listed("What preparation finds") == sorted(made)


def test_warnings_are_documented() -> None:
    assert listed("Warnings") == sorted([*statistics._MESSAGES, statistics._REASONING])
