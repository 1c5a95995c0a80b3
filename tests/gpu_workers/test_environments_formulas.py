"""String checks, and formulas over graders."""

from __future__ import annotations

from pathlib import Path

import pytest

from finery_gpu_workers.environments.types import Answer
from finery_gpu_workers.errors import WorkerError

from .test_environments import failed, python, rewards_of


@pytest.mark.parametrize(
    ("operation", "text", "reference", "reward"),
    [
        ("eq", "Paris", "Paris", 1.0),
        ("eq", "paris", "Paris", 0.0),
        ("ne", "paris", "Paris", 1.0),
        ("like", "In Paris.", "Paris", 1.0),
        ("like", "Par", "Paris", 0.0),
        ("ilike", "IN PARIS", "Paris", 1.0),
        ("ilike", "STRASSE", "straße", 1.0),
    ],
)
def test_string_checks(tmp_path: Path, operation: str, text: str, reference: str, reward: float) -> None:
    grader = {"type": "string_check", "operation": operation, "reference": "{{ item.answer }}"}
    with rewards_of(grader, tmp_path) as rewards:
        assert rewards.submit(Answer(text, {"answer": reference})).result().reward == reward


def test_a_missing_field_is_a_failure(tmp_path: Path) -> None:
    grader = {"type": "string_check", "operation": "eq", "reference": "{{ item.answer }}"}
    with rewards_of(grader, tmp_path) as rewards:
        assert failed(rewards.submit(Answer("x", {})).result())[0] == "missing_field"


def test_a_formula_over_graders(tmp_path: Path) -> None:
    word = {"type": "string_check", "operation": "like", "reference": "{{ item.word }}"}
    short = python("def grade(sample, item):\n    print('looked')\n    return 1 - len(sample['output_text']) / 10")
    multi = {"type": "multi", "graders": {"short": short, "word": word}, "calculate_output": "0.75 * word + short / 2"}
    with rewards_of(multi, tmp_path) as rewards:
        grade = rewards.submit(Answer("blue", {"word": "blue"})).result()
        assert grade.reward == pytest.approx(0.75 + 0.3)
        assert grade.parts == {"short": pytest.approx(0.6), "word": 1.0}
        assert grade.printed == "looked\n"
        assert grade.cpu_seconds > 0
        missing = rewards.submit(Answer("blue", {})).result()
        assert failed(missing)[0] == "missing_field"
        assert missing.failure is not None
        assert missing.failure.grader == "word"
        assert missing.parts == {"short": None, "word": None}


def test_a_formula_without_a_value_is_a_failure(tmp_path: Path) -> None:
    one = {"type": "string_check", "operation": "eq", "reference": "x"}
    with rewards_of({"type": "multi", "graders": {"a": one}, "calculate_output": "1 / a"}, tmp_path) as rewards:
        assert rewards.submit(Answer("x", {})).result().reward == 1.0
        zero = rewards.submit(Answer("y", {})).result()
        assert failed(zero)[0] == "invalid_reward"
        assert zero.parts == {"a": 0.0}


@pytest.mark.parametrize(("formula", "message"), [("a + b", "found b"), ("a +", "found the end")])
def test_a_formula_that_cannot_be_used(tmp_path: Path, formula: str, message: str) -> None:
    one = {"type": "string_check", "operation": "eq", "reference": "x"}
    multi = {"type": "multi", "graders": {"a": one}, "calculate_output": formula}
    with pytest.raises(WorkerError, match=message) as found, rewards_of(multi, tmp_path):
        pass
    assert found.value.code == "invalid_environment"
