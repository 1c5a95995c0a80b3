"""Reading JSON bodies, whatever they hold."""

from __future__ import annotations

import json
import time
from typing import Any

import pytest

from finery.types.methods import JobCreate, JobUpdate
from finery.types.tenants import KeyCreate, TenantCreate
from finery_service.errors import ServiceError
from finery_service.http.bodies import parse_json

_MEGABYTE = 2**20


def _refused(raw: bytes) -> ServiceError:
    with pytest.raises(ServiceError) as caught:
        parse_json(raw, JobCreate, root_param="model")
    return caught.value


@pytest.mark.parametrize(
    "body",
    [
        {f"key{number}": 0 for number in range(80_000)},
        {"method": "sft", "metadata": {f"key{number}": 0 for number in range(80_000)}},
        {"method": "sft", "added_tokens": [0] * 300_000},
    ],
    ids=["unknown fields", "metadata", "a list"],
)
def test_as_many_errors_as_a_body_can_hold_stop_nobody_else(body: dict[str, Any]) -> None:
    raw = json.dumps(body, separators=(",", ":")).encode()
    assert len(raw) < 2 * _MEGABYTE
    began = time.process_time()
    error = _refused(raw)
    assert time.process_time() - began < 20  # each pair of them compared would take an hour
    assert (error.status, len(error.detail.details or ())) == (400, 20)
    assert len(error.detail.message) < 500


def test_errors_that_are_not_shown_are_counted() -> None:
    error = _refused(json.dumps({f"key{number}": 0 for number in range(1500)}).encode())
    # The unknown ones, and method and training_file, which are missing.
    assert error.detail.message.endswith("(1501 more, the first 20 in details.)")


def test_only_the_deepest_errors_of_a_union_are_told() -> None:
    body = {"method": "sft", "model": "m", "training_file": "file_1", "adapter": {"type": "lora", "targets": ["x"]}}
    error = _refused(json.dumps(body).encode())
    assert [detail["param"] for detail in error.detail.details or ()] == ["adapter.targets[0]"]


def test_a_body_that_is_no_json_number_names_no_field() -> None:
    error = _refused(b"NaN")
    assert (error.detail.code, error.detail.param) == ("invalid_json", None)


@pytest.mark.parametrize("name", ["   ", "\u3000", "two\nlines", "\x1b[31mred", "a\u0085b", "a\u2028b", "tab\t"])
def test_e17_names_of_jobs_tenants_and_keys_are_one_printable_line(name: str) -> None:
    raw = json.dumps({"name": name}).encode()
    for kind in (JobUpdate, TenantCreate, KeyCreate):
        with pytest.raises(ServiceError) as caught:
            parse_json(raw, kind)
        assert (caught.value.status, caught.value.detail.param) == (400, "name")
        assert "expected a name" in caught.value.detail.message


@pytest.mark.parametrize("name", ["a", " tränings 你好 😀 ", "e\u0301", "\u00e9", "x" * 128])
def test_e17_other_names_are_kept_exactly(name: str) -> None:
    assert parse_json(json.dumps({"name": name}).encode(), TenantCreate).value.name == name
