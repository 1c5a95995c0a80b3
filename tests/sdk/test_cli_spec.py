from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from finery.cli import spec


@pytest.mark.parametrize(
    ("text", "value"),
    [("1", 1), ("3e-4", 3e-4), ("true", True), ("null", None), ('"1"', "1"), ("all-linear", "all-linear"), ("", "")],
)
def test_values_are_json_where_they_are_json(text: str, value: Any) -> None:
    assert spec.value(text) == value
    assert type(spec.value(text)) is type(value)


def test_a_dotted_name_may_not_pass_through_a_value() -> None:
    with pytest.raises(ValueError, match="seed is not an object"):
        spec.assign({"seed": 1}, "seed.x=1")


@pytest.mark.parametrize("content", ["[1]", "{", '"text"'])
def test_a_spec_that_is_no_object_is_refused_with_its_place(tmp_path: Path, content: str) -> None:
    path = tmp_path / "job.json"
    path.write_text(content)
    with pytest.raises(ValueError, match=r"job\.json: expected a JSON object"):
        spec.load(path)


def test_a_name_alone_is_a_field_of_the_job_or_else_a_hyper_parameter() -> None:
    body: dict[str, Any] = {}
    for assignment in ("export_merged=true", "priority=high", "learning_rate=3e-4", "adapter.rank=8", "typo=1"):
        spec.assign(body, assignment)
    hyper = {"learning_rate": 3e-4, "typo": 1}
    assert body == {"export_merged": True, "priority": "high", "hyperparameters": hyper, "adapter": {"rank": 8}}
