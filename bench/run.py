"""Runs all benchmarks, or the one that is named, and appends their rows to bench/results.json.

python bench/run.py [NAME [OPTIONS OF THE BENCHMARK]]

A benchmark is a module of this folder that is listed here, with `run(options) -> list[Row]` and the `BOUNDS` of the
ratios of its rows, by name.
"""

from __future__ import annotations

import importlib
import sys

from rows import append

BENCHMARKS = ("service_overhead", "sft_tokens", "dpo_pairs", "generate_tokens", "grpo_step")


def main(arguments: list[str]) -> int:
    if arguments and arguments[0] not in BENCHMARKS:
        print(f"no benchmark is called {arguments[0]}; there are: {', '.join(BENCHMARKS)}")
        return 2
    failed = False
    for name in arguments[:1] or BENCHMARKS:
        module = importlib.import_module(name)
        for row in module.run(arguments[1:]):
            append(row)
            bound = module.BOUNDS[row.name]
            failed |= not bound.holds(row.ratio)
            verdict = "holds" if bound.holds(row.ratio) else "MISSED"
            print(f"{row.name}: ratio {row.ratio:.4f}, {verdict}: {bound} ({row.runs} runs; {row.note})")
    return int(failed)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
