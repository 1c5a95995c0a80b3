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
