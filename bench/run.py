"""Runs all benchmarks, or the one that is named, and appends their rows to bench/results.json.

python bench/run.py [NAME]

A benchmark is a module of this folder that is listed here, with `run() -> Row` and the limit of its ratio.
"""

from __future__ import annotations

import importlib
import sys

from rows import append

BENCHMARKS = ("service_overhead",)


def main(names: list[str]) -> int:
    unknown = sorted(set(names) - set(BENCHMARKS))
    if unknown:
        print(f"no benchmark is called {', '.join(unknown)}; there are: {', '.join(BENCHMARKS)}")
        return 2
    failed = False
    for name in names or BENCHMARKS:
        module = importlib.import_module(name)
        row = module.run()
        append(row)
        within = row.ratio <= module.LIMIT
        failed |= not within
        verdict = "within" if within else "OVER"
        print(f"{row.name}: ratio {row.ratio:.4f}, {verdict} the limit of {module.LIMIT} ({row.runs} runs; {row.note})")
    return int(failed)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
