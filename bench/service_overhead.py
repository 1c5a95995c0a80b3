"""The part of a step that is not spent in learner calls: 1 - sum(learner_seconds) / sum(step_seconds).

A real SFT job on SmolLM2-135M through `finery-service up`, measured from its own metric events. A step's time runs from
the end of the previous one, so that waiting for grants, commits and checkpoints are in it. The first step of a run is
left out: its time holds the warm-up of the libraries.
"""

from __future__ import annotations

import platform
import statistics
import tempfile
from collections.abc import Iterable
from pathlib import Path
from typing import Any

from rows import Bound, Row

from finery import Finery
from finery_testing.stack import Stack

LIMIT = 0.03
BOUNDS = {"service_overhead": Bound(at_most=LIMIT)}
RUNS = 3
STEPS = 10
SAMPLE = Path(__file__).resolve().parent.parent / "examples/chat_sample.jsonl"
HYPERPARAMETERS = {"max_steps": STEPS, "batch_tokens": 1024, "max_length": 512, "checkpoint_every": 5}


def overhead(metrics: Iterable[dict[str, Any]]) -> tuple[float, float]:
    """Seconds outside learner calls and seconds in all, over the steps from the second on."""
    later = [metric for metric in metrics if metric["step"] > 1]
    whole = sum(metric["step_seconds"] for metric in later)
    return whole - sum(metric["learner_seconds"] for metric in later), whole


def measure(client: Finery, file: str) -> tuple[float, float]:
    job = client.jobs.create(
        method="sft", model="smollm2-135m-instruct", training_file=file, hyperparameters=HYPERPARAMETERS
    )
    metrics = [event.data for event in client.jobs.stream(job.id) if event.type == "metric"]
    client.jobs.wait(job.id)  # raises unless it succeeded
    if [metric["step"] for metric in metrics] != list(range(1, STEPS + 1)):
        raise RuntimeError(f"expected {STEPS} steps, found {[metric['step'] for metric in metrics]}")
    return overhead(metrics)


def run(_: list[str]) -> list[Row]:
    with tempfile.TemporaryDirectory(prefix="finery-bench-", dir="/tmp") as folder:
        Path(folder).chmod(0o755)  # as root, PostgreSQL runs as an unprivileged user and must reach its data
        stack = Stack(Path(folder) / "home", tenant="bench", torch_threads=None)
        try:
            stack.start()
            with stack.client() as client:
                file = client.files.upload(SAMPLE)
                measured = [measure(client, file.id) for _ in range(RUNS)]
        finally:
            stack.stop()
    outside, whole = min(measured, key=lambda pair: abs(pair[0] / pair[1] - _median(measured)))
    row = Row(
        name="service_overhead",
        ours=round(outside, 4),
        reference=round(whole, 4),
        ratio=round(_median(measured), 4),
        unit="seconds outside learner calls per seconds of all steps",
        runs=RUNS,
        note=f"median run; {STEPS - 1} steps of 1024 tokens on {platform.machine()} CPU; limit {LIMIT}",
    )
    return [row]


def _median(measured: list[tuple[float, float]]) -> float:
    return statistics.median(outside / whole for outside, whole in measured)
