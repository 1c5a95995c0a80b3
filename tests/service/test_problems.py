"""What pydantic says, in our words."""

from __future__ import annotations

import json
from typing import Any

import pytest

from finery.types.methods import JobCreate
from finery_service.errors import ServiceError
from finery_service.http.bodies import OneOf, parse_json

SEVENTEEN = dict.fromkeys("abcdefghijklmnopq", "")
_CREATE: OneOf[Any] = OneOf(JobCreate)


@pytest.mark.parametrize(
    ("fields", "told"),
    [
        ({"added_tokens": ["a"] * 257}, "added_tokens: expected a list with at most 256 items, found 257."),
        ({"metadata": SEVENTEEN}, "metadata: expected an object with at most 16 items, found more."),
        ({"adapter": {"targets": []}}, "adapter.targets: expected a list with at least 1 item, found 0."),
        ({"adapter": {"targets": "q_proj"}}, "adapter.targets: expected 'all-linear' or a list, found 'q_proj'."),
    ],
)
def test_too_many_too_few_and_other_kinds(fields: dict[str, Any], told: str) -> None:
    body = {"method": "sft", "model": "m", "training_file": "file_" + "0" * 36, **fields}
    with pytest.raises(ServiceError) as caught:
        parse_json(json.dumps(body).encode(), _CREATE)
    assert caught.value.detail.message == told


@pytest.mark.parametrize("environment", [{}, {"task": "chain_sum"}])
def test_an_object_that_does_not_say_what_it_is(environment: dict[str, Any]) -> None:
    with pytest.raises(ServiceError) as caught:
        parse_json(json.dumps({"method": "rl", "model": "m", "environment": environment}).encode(), _CREATE)
    told = "environment: expected an object whose 'type' says what it is, found no type."
    assert caught.value.detail.message == told


def test_a_number_that_is_too_long_is_told_without_the_readers_own_words() -> None:
    with pytest.raises(ServiceError) as caught:
        parse_json(b'{"method": "sft", "seed": ' + b"9" * 5000 + b"}", _CREATE)
    assert caught.value.detail.code == "invalid_json"
    assert caught.value.detail.message.endswith("numbers of a few thousand digits at most, found a longer one.")
