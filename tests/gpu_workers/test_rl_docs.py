"""docs/rl.md lists what there is: algorithms with what they set, metrics, units of usage."""

from __future__ import annotations

import re
from dataclasses import fields
from pathlib import Path

from finery.types.rl_algorithms import ALGORITHMS
from finery.types.usage import Sku
from finery_gpu_workers.methods.rl_report import step_metrics
from finery_gpu_workers.methods.rl_sample import Sampled
from finery_gpu_workers.methods.rl_update import Sums, Updated
from finery_gpu_workers.metrics import StepMetrics

from .rl_jobs import rollout

PAGE = (Path(__file__).parents[2] / "docs/rl.md").read_text(encoding="utf-8")


def table(heading: str) -> list[list[str]]:
    """The cells of a section's first table, without its head."""
    section = PAGE.partition(f"\n## {heading}\n")[2].partition("\n## ")[0]
    rows = [line.strip("|").split("|") for line in section.splitlines() if line.startswith("|")]
    return [[cell.strip() for cell in row] for row in rows[2:]]


def names(cells: list[list[str]]) -> list[str]:
    return [name for row in cells for name in re.findall(r"`([a-z_.]+)`", row[0])]


def test_the_table_of_algorithms_is_what_the_code_sets() -> None:
    expected = {
        name: [
            one.baseline, one.advantage_scale, one.ratio, one.loss_normalization,
            f"{one.clip_low:.4g}" if one.clip_low < 1 else f"{one.clip_low:.1f}",
            f"{one.clip_high:.4g}" if one.clip_high < 1 else f"{one.clip_high:.1f}",
            "yes" if one.dynamic_sampling else "no", one.overlong,
        ]
        for name, one in ALGORITHMS.items()
    }  # fmt: skip
    assert {row[0].strip("`"): row[1:] for row in table("Algorithms")} == expected


def test_every_metric_is_documented_and_no_other() -> None:
    sampled = Sampled(rollouts=[rollout(0, 0, 1.0, trained=True)])
    made = {field.name for field in fields(StepMetrics)} | {"tokens_per_second", "train_seconds"}
    made |= set(step_metrics(sampled, Updated(sums=Sums(tokens=1)), reference=True))
    assert sorted(names(table("Metrics"))) == sorted(made)


def test_every_unit_of_usage_is_documented() -> None:
    ours = [sku for sku in Sku if sku.startswith(("rollout.", "reward.")) or sku.endswith(".rl")]
    assert sorted(names(table("Billing"))) == sorted(ours)
