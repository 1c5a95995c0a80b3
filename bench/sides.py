"""What benchmarks against TRL share: runs in processes of their own, in turn, and the rows that come of them."""

from __future__ import annotations

import json
import os
import statistics
import subprocess
import sys
import tempfile
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

from rows import Bound, Row

HERE = Path(__file__).resolve().parent
Side = Callable[[], dict[str, Any]]
KEEP_MEMORY = {"MALLOC_TRIM_THRESHOLD_": "4294967296", "MALLOC_MMAP_THRESHOLD_": "4294967296"}


def ours(script: str, job: dict[str, Any]) -> dict[str, Any]:
    return _process(sys.executable, script, job, {})


def trl(script: str, job: dict[str, Any], candidate: Mapping[str, Any]) -> dict[str, Any]:
    """`candidate`: overrides of TRL's `config`, its `environment`, and whether its adapter is bf16 too."""
    job = {**job, "config": candidate["config"], "adapter_in_bf16": candidate.get("adapter_in_bf16", False)}
    return _process(str(HERE / ".venv/bin/python"), script, job, candidate.get("environment", {}))


def _process(python: str, script: str, job: dict[str, Any], environment: dict[str, str]) -> dict[str, Any]:
    with tempfile.NamedTemporaryFile("w", suffix=".json") as file:
        json.dump(job, file)
        file.flush()
        variables = {**os.environ, "OMP_NUM_THREADS": str(job["threads"]), **environment}
        done = subprocess.run(
            [python, str(HERE / script), file.name], env=variables, capture_output=True, text=True, check=False
        )
    if done.returncode:
        raise RuntimeError(f"{script} ended with {done.returncode}:\n{done.stderr[-2000:]}")
    result: dict[str, Any] = json.loads(done.stdout.splitlines()[-1])
    return result


def in_turn(sides: Mapping[str, Side], pairs: int, what: str) -> dict[str, list[dict[str, Any]]]:
    """Every side `pairs` times, one after the other. `what` names the count that a run's result is about."""
    runs: dict[str, list[dict[str, Any]]] = {name: [] for name in sides}
    for _ in range(pairs):
        for name, side in sides.items():
            runs[name].append(side())
            show(name, runs[name][-1], what)
    return runs


def show(name: str, one: Mapping[str, Any], what: str) -> None:
    cpu, wall = (one[what] / one[kind] for kind in ("cpu", "wall"))
    peak = one["peak"] / 1e9
    print(
        f"{name}: {one[what]} {what}, {cpu:.3f} per CPU-second, {wall:.3f} per second, peak {peak:.2f} GB", flush=True
    )


def row(
    name: str,
    runs: Mapping[str, list[dict[str, Any]]],
    other: str,
    measure: Callable[[dict[str, Any]], float],
    *,
    unit: str,
    note: str,
    bound: Bound,
    peer: str = "TRL 1.16",
) -> Row:
    """The median of the ratios of neighbouring runs, ours over the other's."""
    mine, theirs = ([measure(one) for one in runs[side]] for side in ("ours", other))
    ratio = statistics.median(a / b for a, b in zip(mine, theirs, strict=True))
    return Row(
        name=name,
        ours=round(statistics.median(mine), 4),
        reference=round(statistics.median(theirs), 4),
        ratio=round(ratio, 4),
        unit=unit,
        runs=len(mine),
        note=f"{peer}, {other}; {note}; {bound}",
    )
