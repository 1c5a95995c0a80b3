"""The size contract of design.md section 3."""

from __future__ import annotations

import ast
import json
import statistics
import subprocess
from itertools import pairwise
from pathlib import Path

import pytest

from .sizes import ROOT, SHIPPED, Size, all_sizes, functions, lowered, measure, python_files, read_record, violations


def test_no_file_or_function_is_over_its_recorded_size() -> None:
    found = violations(all_sizes(), read_record())
    assert not found, "\n" + "\n".join(found)


def test_functions_of_the_shipped_source_are_short_on_the_whole() -> None:
    lines = sorted(size.lines for path in python_files(SHIPPED) for size in measure(path) if "::" in size.name)
    hundredths = statistics.quantiles(lines, n=100)
    median, p90, p99 = statistics.median(lines), hundredths[89], hundredths[98]
    assert median <= 9, f"median {median} over {len(lines)} functions"
    assert p90 <= 35, f"90th percentile {p90}"
    assert p99 <= 80, f"99th percentile {p99}"


def test_recorded_sizes_never_rose_in_the_history_of_the_record() -> None:
    path = "tests/architecture/ratchet.json"
    log = subprocess.run(
        ["git", "log", "--reverse", "--format=%H", "--", path], cwd=ROOT, capture_output=True, text=True
    )
    if log.returncode != 0:
        pytest.skip("not a git checkout")
    versions = [_at(commit, path) for commit in log.stdout.split()] + [read_record()]
    for before, after in pairwise(versions):
        rose = {name: (before[name], lines) for name, lines in after.items() if lines > before.get(name, lines)}
        assert not rose, f"recorded sizes may only fall: {rose}"


def _at(commit: str, path: str) -> dict[str, int]:
    shown = subprocess.run(["git", "show", f"{commit}:{path}"], cwd=ROOT, capture_output=True, text=True, check=True)
    content: dict[str, int] = json.loads(shown.stdout)
    return content


@pytest.mark.parametrize(
    ("lines", "record", "complaint"),
    [
        (40, {}, None),
        (41, {}, "allowed are 40"),
        (45, {"a::f": 45}, None),
        (46, {"a::f": 45}, "allowed are 45"),
        (44, {"a::f": 45}, "make ratchet"),
        (61, {"a::f": 61}, "the limit is 60"),
    ],
)
def test_an_exception_is_recorded_and_may_only_fall(lines: int, record: dict[str, int], complaint: str | None) -> None:
    found = violations([Size("a::f", lines, 40, 60)], record)
    assert len(found) == (complaint is not None)
    assert complaint is None or complaint in found[0]


def test_a_record_of_something_that_is_gone_is_a_violation() -> None:
    assert "does not exist" in violations([], {"a::f": 45})[0]


def test_recording_lowers_and_drops_and_adds_only_on_request() -> None:
    sizes = [Size("fell", 41, 40, 60), Size("under", 40, 40, 60), Size("new", 50, 40, 60), Size("rose", 50, 40, 60)]
    record = {"fell": 45, "under": 45, "gone": 45, "rose": 45}
    assert lowered(sizes, record) == {"fell": 41, "rose": 45}
    assert lowered(sizes, record, accept=True) == {"fell": 41, "new": 50, "rose": 45}


def test_lines_of_a_function_by_hand() -> None:
    source = "class A:\n    @property\n    def f(self):\n        def g():\n            return 1\n\n        return g\n"
    assert dict(functions(ast.parse(source))) == {"A.f": 5, "A.f.g": 2}


def test_the_measured_places_exist() -> None:
    missing = [place for place in SHIPPED if not (ROOT / place).exists()]
    assert not missing
    assert len(list(python_files(SHIPPED))) > 20
    assert all(isinstance(path, Path) for path in python_files(SHIPPED))
