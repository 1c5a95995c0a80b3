"""Tasks of reasoning-gym: prompts that are made, answers that it scores."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from finery.types.environments import ReasoningGymEnvironment
from finery_gpu_workers.environments.prompts import write_prompts
from finery_gpu_workers.environments.rewards import open_rewards
from finery_gpu_workers.environments.types import Answer
from finery_gpu_workers.errors import WorkerError

from .test_environments import failed


def task(**fields: Any) -> ReasoningGymEnvironment:
    return ReasoningGymEnvironment.model_validate({"type": "reasoning_gym", "task": "chain_sum", "seed": 3} | fields)


def made(spec: ReasoningGymEnvironment, folder: Path, count: int) -> list[dict[str, Any]]:
    write_prompts(spec, count, folder / "prompts.jsonl", folder)
    return [json.loads(line) for line in (folder / "prompts.jsonl").read_text().splitlines()]


@pytest.fixture(scope="module")
def rows(tmp_path_factory: pytest.TempPathFactory) -> list[dict[str, Any]]:
    return made(task(), tmp_path_factory.mktemp("rows"), 120)


def test_prompts_are_the_same_each_time_and_longer_files_begin_with_shorter_ones(
    tmp_path: Path, rows: list[dict[str, Any]]
) -> None:
    assert len(rows) == 120
    assert len({row["question"] for row in rows}) > 110
    again = made(task(system_prompt="Be brief."), tmp_path, 101)
    assert again[0]["prompt"][0] == {"role": "system", "content": "Be brief."}
    assert [row["question"] for row in again] == [row["question"] for row in rows[:101]]
    assert [row["prompt"][1:] for row in again] == [row["prompt"] for row in rows[:101]]


def test_config_and_seed_count(tmp_path: Path, rows: list[dict[str, Any]]) -> None:
    others = made(task(seed=4, config={"min_terms": 2, "max_terms": 2}), tmp_path, 20)
    assert all(row["metadata"]["num_terms"] == 2 for row in others)
    assert all(other["question"] != row["question"] for other, row in zip(others, rows, strict=False))


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        ({"task": "chain_sums"}, "such as chain_sum"),
        ({"config": {"min_terms": -1}}, "min_terms must be positive"),
    ],
)
def test_tasks_that_reasoning_gym_refuses(tmp_path: Path, fields: dict[str, Any], message: str) -> None:
    with pytest.raises(WorkerError, match=message) as found:
        made(task(**fields), tmp_path, 1)
    assert found.value.code == "invalid_environment"


@pytest.mark.parametrize("pattern", ["(a+)+$", "(a|aa)+$"])
def test_a_pattern_that_takes_for_ever_is_a_timeout(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, rows: list[dict[str, Any]], pattern: str
) -> None:
    """H11: the process is killed; threads and signals do not stop `re`."""
    from finery_gpu_workers.environments import graders

    monkeypatch.setattr(graders, "_TASK_SECONDS", 1.0)
    spec = task(answer_pattern=pattern)
    rewards = open_rewards(spec, tmp_path, workers=1, score_models={})
    grade = rewards.submit(Answer("a" * 40 + "b", rows[0])).result(60)
    rewards.close()
    assert failed(grade)[0] == "timeout"
    assert grade.seconds < 10.0


def test_an_answer_is_what_the_pattern_finds_last(tmp_path: Path, rows: list[dict[str, Any]]) -> None:
    spec, row = task(answer_pattern=r"<answer>(.*?)</answer>"), rows[0]
    rewards = open_rewards(spec, tmp_path, workers=1, score_models={})
    texts = ["<answer>1</answer> no, <answer>214</answer>", "<answer>214</answer> no, <answer>1</answer>", "214"]
    assert [rewards.submit(Answer(text, row)).result(60).reward for text in texts] == [1.0, 0.0, 0.0]
    assert failed(rewards.submit(Answer("1", {"question": "?"})).result(60))[0] == "missing_field"
    assert failed(rewards.submit(Answer("1", row | {"index": 0, "question": "another"})).result(60))[0] == "error"
    rewards.close()
