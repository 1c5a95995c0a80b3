"""The reader of untrusted JSON does not get slow or wordy, whatever it is given."""

from __future__ import annotations

import json
import time

from finery.data.check import RowCheck
from finery.data.strict_json import StrictReader


def test_h03_a_duplicate_among_many_keys_is_found_in_linear_time() -> None:
    # Each key compared with every other one would be 10^10 comparisons: a minute, on the event loop for a JSON body.
    keys = [f"k{number}" for number in range(100_000)]
    text = "{" + ",".join(f'"{key}":0' for key in [*keys, "k7", "k7", "k9"]) + "}"
    start = time.process_time()
    _, flaws = StrictReader().read(text)
    assert time.process_time() - start < 5
    assert [(flaw.code, flaw.path) for flaw in flaws] == [("duplicate_key", ("k7",)), ("duplicate_key", ("k9",))]


def test_the_place_of_a_deep_flaw_is_cut() -> None:
    # A hundred of them are stored with the file and come with every list of files.
    name = "k" * 60
    deep = "[" + f'{{"{name}":' * 200 + '{"a":1,"a":2}' + "}" * 200 + "]"
    check = RowCheck()
    check.feed(f"{deep}\n".encode() * 3)
    report = check.finish()
    assert [problem.code for problem in report.problems] == ["duplicate_key"] * 3
    assert all(problem.path.startswith(f"[0].{name}.") for problem in report.problems)
    assert len(json.dumps([problem.model_dump() for problem in report.problems])) < 3_000
