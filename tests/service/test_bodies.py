"""Reading JSON bodies, whatever they hold."""

from __future__ import annotations

import json
import time
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from finery.types.methods import JobCreate, JobUpdate, RlJobCreate
from finery.types.models import ModelCreate
from finery.types.tenants import KeyCreate, TenantCreate
from finery_service.errors import ServiceError
from finery_service.http.bodies import OneOf, parse_json

_MEGABYTE = 2**20
_CREATE: OneOf[Any] = OneOf(JobCreate)


def _refused(raw: bytes) -> ServiceError:
    with pytest.raises(ServiceError) as caught:
        parse_json(raw, _CREATE, root_param="model")
    return caught.value


@pytest.mark.parametrize(
    "body",
    [
        {"method": "sft", **{f"key{number}": 0 for number in range(80_000)}},
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
    error = _refused(json.dumps({"method": "sft", **{f"key{number}": 0 for number in range(1500)}}).encode())
    # The unknown ones, and training_file, which is missing.
    assert error.detail.message.endswith("(1500 more, the first 20 in details.)")


def test_only_the_deepest_errors_of_a_union_are_told() -> None:
    body = {"method": "sft", "model": "m", "training_file": "file_1", "adapter": {"type": "lora", "targets": ["x"]}}
    error = _refused(json.dumps(body).encode())
    assert [detail["param"] for detail in error.detail.details or ()] == ["adapter.targets[0]"]


_SPEC = {"method": "sft", "model": "m", "training_file": "file_1"}


@pytest.mark.parametrize(
    ("changes", "param", "said"),
    [
        ({"hyperparameters": {"learning_rte": 1}}, "hyperparameters.learning_rte", "(did you mean learning_rate?)"),
        ({"seeed": 1}, "seeed", "(did you mean seed?)"),
        ({"learning_rate": 1e-4}, "learning_rate", "(did you mean hyperparameters.learning_rate?)"),
        ({"adapter": {"r": 8, "alfa": 1}}, "adapter.alfa", "(did you mean alpha?)"),
        ({"adapter": {"type": "full", "rank": 8}}, "adapter.rank", "expected no field of this name."),
        ({"zzz": 1}, "zzz", "zzz: expected no field of this name."),
    ],
)
def test_a_field_that_does_not_exist_is_answered_with_the_closest_that_does(
    changes: dict[str, Any], param: str, said: str
) -> None:
    details = _refused(json.dumps(_SPEC | changes).encode()).detail.details or ()
    (message,) = [detail["message"] for detail in details if detail["param"] == param]
    assert message.removesuffix(".").endswith(said.removesuffix("."))


@pytest.mark.parametrize(
    ("body", "code", "told"),
    [
        ({}, "missing_field", "found nothing"),
        ({"metod": "sft"}, "missing_field", "found nothing"),
        ({"method": "ppo"}, "invalid_value", "found 'ppo'"),
        ({"method": "SFT"}, "invalid_value", "found 'SFT'"),
        ({"method": None}, "invalid_value", "found null"),
        ({"method": ["rl"]}, "invalid_value", "found a list"),
        ({"method": "not one of them, and long"}, "invalid_value", "found a text of 25 characters"),
    ],
)
def test_a_body_without_one_of_the_methods_is_told_the_three(body: dict[str, Any], code: str, told: str) -> None:
    error = _refused(json.dumps({**body, "surprise": 1, "seed": "x"}).encode()).detail
    assert (error.code, error.param) == (code, "method")
    assert error.message == f"method: expected one of 'sft', 'dpo', 'rl', {told}."


@pytest.mark.parametrize(
    ("method", "changes", "param", "said"),
    [
        ("dpo", {"hyperparameters": {"train_on": "all"}}, "hyperparameters.train_on", "belongs to method sft"),
        ("sft", {"hyperparameters": {"beta": 0.1}}, "hyperparameters.beta", "belongs to method dpo"),
        ("rl", {"hyperparameters": {"epochs": 2}}, "hyperparameters.epochs", "belongs to method sft and dpo"),
        ("rl", {"training_file": "file_1"}, "training_file", "belongs to method sft and dpo"),
        ("sft", {"environment": "env_1"}, "environment", "belongs to method rl"),
        ("dpo", {"hyperparameters": {"bta": 0.1}}, "hyperparameters.bta", "(did you mean beta?)"),
        (
            "rl",
            {"hyperparameters": {"samples_per_promt": 8}},
            "hyperparameters.samples_per_promt",
            "samples_per_prompt?",
        ),
        ("rl", {"algorithm": "grpo"}, "algorithm", "(did you mean hyperparameters.algorithm?)"),
        ("dpo", {"hyperparameters": {"beta": 0}}, "hyperparameters.beta", "expected greater than 0, found 0"),
        ("dpo", {"hyperparameters": {"label_smoothing": 0.5}}, "hyperparameters.label_smoothing", "less than 0.5"),
        ("dpo", {"hyperparameters": {"loss": "kto"}}, "hyperparameters.loss", "'apo_down', found 'kto'"),
        ("rl", {"hyperparameters": {"algorithm": "ppo"}}, "hyperparameters.algorithm", "'cispo', found 'ppo'"),
    ],
)
def test_errors_are_those_of_the_method_that_was_chosen(
    method: str, changes: dict[str, Any], param: str, said: str
) -> None:
    error = _refused(json.dumps({"method": method, "model": "m", **changes}).encode()).detail
    (message,) = [detail["message"] for detail in error.details or () if detail["param"] == param]
    assert message.startswith(f"{param}: ")
    assert said in message
    for tag in ("sft.", "dpo.", "rl."):
        assert not any((detail["param"] or "").startswith(tag) for detail in error.details or ())


@pytest.mark.parametrize(
    ("environment", "param", "told"),
    [
        (5, "environment", "expected a text or an object, found 5"),
        (None, "environment", "expected a text or an object, found null"),
        ("mine", "environment", "expected an id that begins with env_ or an object, found 'mine'"),
        ({}, "environment", "found no type"),
        ({"type": "gym"}, "environment", "expected one of 'reasoning_gym', 'prompts' as 'type', found type 'gym'"),
        ({"type": "reasoning_gym"}, "environment.task", "expected this field, found nothing"),
        ({"type": "reasoning_gym", "task": "x", "sise": 3}, "environment.sise", "(did you mean size?)"),
        ({"type": "prompts", "file": "file_1"}, "environment.grader", "expected this field, found nothing"),
        ({"type": "prompts", "file": "file_1", "grader": "eq"}, "environment.grader", "expected an object, found 'eq'"),
        (
            {"type": "prompts", "file": "file_1", "grader": {"type": "regex"}},
            "environment.grader",
            "'score_model', 'multi' as 'type', found type 'regex'",
        ),
        (
            {"type": "prompts", "file": "file_1", "grader": {"type": "python", "sorce": ""}},
            "environment.grader.source",
            "expected this field, found nothing",
        ),
        (
            {
                "type": "prompts",
                "file": "file_1",
                "grader": {"type": "multi", "graders": {"python": {"type": "python"}}, "calculate_output": "python"},
            },
            "environment.grader.graders.python.source",
            "expected this field, found nothing",
        ),
        (
            {"type": "prompts", "prompts": [], "grader": {"type": "python", "source": "x"}},
            "environment.file",
            "expected this field, found nothing",
        ),
    ],
)
def test_an_environment_is_answered_with_one_sentence_for_each_wrong_field(
    environment: Any, param: str, told: str
) -> None:
    error = _refused(json.dumps({"method": "rl", "model": "m", "environment": environment}).encode()).detail
    params = [detail["param"] for detail in error.details or ()]
    assert len(params) == len(set(params))
    (message,) = [detail["message"] for detail in error.details or () if detail["param"] == param]
    assert told in message


def test_a_union_of_a_text_and_a_list_says_both() -> None:
    error = _refused(json.dumps({**_SPEC, "adapter": {"targets": "q_proj"}}).encode()).detail
    assert error.message == "adapter.targets: expected 'all-linear' or a list, found 'q_proj'."


def test_a_very_long_field_name_is_compared_with_nothing() -> None:
    began = time.process_time()
    error = _refused(json.dumps(_SPEC | {f"{n}{'seed' * 20_000}": 0 for n in range(20)}).encode())
    assert time.process_time() - began < 5
    assert "did you mean" not in error.detail.message


@pytest.mark.parametrize(
    ("changes", "said"),
    [
        ({"adapter": {"targets": ["q_prj"]}}, ("'q_proj'", "found 'q_prj'")),
        ({"adapter": {"type": "qlora"}}, ("'lora', 'full'", "found type 'qlora'")),
        ({"adapter": {"type": None}}, ("'lora', 'full'", "found type null")),
        ({"priority": "urgent"}, ("'low', 'normal' or 'high'", "found 'urgent'")),
        ({"priority": "x" * 17}, ("'low', 'normal' or 'high'", "found a text of 17 characters")),
    ],
)
def test_a_choice_that_does_not_exist_is_told_with_those_that_do(
    changes: dict[str, Any], said: tuple[str, ...]
) -> None:
    message = _refused(json.dumps(_SPEC | changes).encode()).detail.message
    assert all(part in message for part in said), message


def test_a_union_by_a_discriminator_tells_the_type_it_found() -> None:
    for source, said in (({"type": "ftp"}, "found type 'ftp'"), ({}, "found no type")):
        with pytest.raises(ServiceError, match=said) as caught:
            parse_json(json.dumps({"name": "m", "source": source}).encode(), ModelCreate)
        assert caught.value.detail.param == "source"


@pytest.mark.parametrize("given", ["data/train.jsonl", "train.jsonl", "train", "/tmp/x", ""])
@pytest.mark.parametrize("field", ["training_file", "validation_file"])
def test_a_path_instead_of_a_file_is_answered_with_how_to_upload_it(field: str, given: str) -> None:
    error = _refused(json.dumps(_SPEC | {field: given}).encode()).detail
    assert error.param == field
    for said in ("expected an id that begins with file_, found", "client.files.upload", "finery files upload"):
        assert said in error.message
    assert "^" not in error.message


def test_other_ids_are_asked_for_by_their_beginning() -> None:
    error = _refused(json.dumps(_SPEC | {"project": "mine"}).encode()).detail
    assert error.message == "project: expected an id that begins with proj_, found 'mine'."


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


_NAMES = st.sampled_from(
    [
        "type",
        "python",
        "prompts",
        "grader",
        "graders",
        "file",
        "task",
        "source",
        "lora",
        "targets",
        "input",
        "x",
        "name",
    ]
)
_JSON: st.SearchStrategy[Any] = st.recursive(
    st.none()
    | st.booleans()
    | st.integers(-9, 9)
    | _NAMES
    | st.sampled_from(["reasoning_gym", "multi", "score_model"]),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(_NAMES, inner, max_size=5),
    max_leaves=12,
)


@given(st.sampled_from(["sft", "dpo", "rl"]), st.dictionaries(st.sampled_from(sorted(RlJobCreate.model_fields)), _JSON))
def test_whatever_is_sent_is_taken_or_answered_with_one_sentence_for_each_field(
    method: str, body: dict[str, Any]
) -> None:
    try:
        parse_json(json.dumps({**body, "method": method}).encode(), _CREATE, root_param="model")
    except ServiceError as error:
        told = [(detail["param"], detail["code"], detail["message"]) for detail in error.detail.details or ()]
        params = [param for param, _, _ in told]
    else:
        return
    assert len(params) == len(set(params)) > 0
    for param, _, message in told:
        assert message.startswith(f"{param}: expected "), message
        assert "found" in message or "no field of this name" in message, message
