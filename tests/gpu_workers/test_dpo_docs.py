"""docs/dpo.md lists what there is: losses with their beta, metrics, units of usage; its example is a job."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any, get_args

import pytest
from pydantic import TypeAdapter

from finery.types.dpo import REFERENCE_FREE, DpoHyperparameters, PreferenceLoss, resolved
from finery.types.ids import new_id
from finery.types.methods import JobCreate

from .conftest import MakeJob, trained
from .test_dpo import pair_rows

PAGE = (Path(__file__).parents[2] / "docs/dpo.md").read_text(encoding="utf-8")


def table(heading: str) -> list[list[str]]:
    """The cells of a section's table, without its head."""
    section = PAGE.partition(f"\n## {heading}\n")[2].partition("\n## ")[0]
    rows = [line.strip("|").split("|") for line in section.splitlines() if line.startswith("|")]
    return [[cell.strip() for cell in row] for row in rows[2:]]


def test_every_loss_is_documented_with_its_beta_and_no_other() -> None:
    documented = {row[0].strip("`"): float(row[2]) for row in table("Losses")}
    smoothed: dict[str, Any] = {"robust": {"label_smoothing": 0.1}}
    names = get_args(PreferenceLoss)
    expected = {name: resolved(DpoHyperparameters(loss=name, **smoothed.get(name, {}))).beta for name in names}
    assert documented == expected
    (free,) = re.findall(r"`(\w+)` and `(\w+)` look\s+at the policy only", PAGE)
    assert set(free) == REFERENCE_FREE


def test_every_metric_is_documented_and_no_other(make_job: MakeJob) -> None:
    control = trained(make_job(pair_rows(2), method="dpo", max_steps=1))
    names = {name for row in table("Metrics") for name in re.findall(r"`(\w+)`", row[0])}
    assert names == set(control.steps[0].metrics)
    assert {usage.sku for usage in control.steps[0].usage} == {"train.dpo"}


@pytest.mark.parametrize("example", re.findall(r"```json\n(.*?)```", PAGE, re.DOTALL))
def test_the_example_is_a_job(example: str) -> None:
    adapter: TypeAdapter[JobCreate] = TypeAdapter(JobCreate)
    assert adapter.validate_json(example.replace("file_…", new_id("file", 0))).method == "dpo"
