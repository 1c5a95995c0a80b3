"""The examples of docs/environments.md do what the page says. Their JSON is parsed in tests/architecture too."""

from __future__ import annotations

import json
import re
from pathlib import Path

import pytest

from finery.types.environments import PromptsEnvironment
from finery_gpu_workers.environments.rewards import open_rewards
from finery_gpu_workers.environments.similarity import MAX_CHARACTERS, METRICS
from finery_gpu_workers.environments.types import Answer
from finery_gpu_workers.sandbox.limits import Limits

from .test_environments import SPEC, python, rewards_of

DOCS = Path(__file__).parents[2] / "docs"
PAGE = (DOCS / "environments.md").read_text("utf-8")
ITEM = {"answer": "42", "question": "6 * 7?", "summary": "It is 42.", "solution": "6 * 7 = 42"}
FORGING = """import os
for fd in range(3, 99):
    try: os.write(fd, b'42')
    except OSError: pass"""
SPECS = [json.loads(block)["spec"] for block in re.findall(r"^```json\n(.*?)^```", PAGE, re.DOTALL | re.MULTILINE)]


@pytest.mark.parametrize("spec", SPECS, ids=lambda spec: spec.get("grader", spec)["type"])
def test_each_example_opens(spec: dict[str, object], tmp_path: Path) -> None:
    parsed = SPEC.validate_json(json.dumps(spec))
    rewards = open_rewards(parsed, tmp_path, workers=1, score_models={"https://judge.example/v1": None})
    try:
        if isinstance(parsed, PromptsEnvironment) and parsed.grader.type != "score_model":
            grade = rewards.submit(Answer("42", ITEM)).result(30)
            assert grade.reward is not None
            assert grade.reward > 0.3
    finally:
        rewards.close()


def test_the_python_example(tmp_path: Path) -> None:
    [source] = [
        block for block in re.findall(r"^```python\n(.*?)^```", PAGE, re.DOTALL | re.MULTILINE) if "def " in block
    ]
    with rewards_of(python(source), tmp_path) as rewards:
        grade = rewards.submit(Answer("It is 42 .", ITEM)).result(30)
    assert (grade.reward, grade.parts, grade.printed) == (1.5, {"right": 1.0, "short": 0.5}, "4 words\n")


def test_the_way_to_run_what_a_model_wrote(tmp_path: Path) -> None:
    source = (
        "import subprocess, sys\n"
        "def grade(sample, item):\n"
        "    run = [sys.executable, '-I', '-c', sample['output_text']]\n"
        "    return subprocess.run(run, timeout=5, capture_output=True, text=True).stdout.strip() == item['answer']\n"
    )
    with rewards_of(python(source), tmp_path) as rewards:
        answers = ["print(6 * 7)", "print(6 + 7)", FORGING]
        grades = [rewards.submit(Answer(answer, ITEM)).result(30) for answer in answers]
    assert [grade.reward for grade in grades] == [1.0, 0.0, 0.0], grades


def test_figures_and_names_of_the_pages() -> None:
    sandbox, limits = (DOCS / "sandbox.md").read_text("utf-8"), Limits()
    assert f"{limits.tmp_bytes >> 20} MiB and {limits.tmp_files} files" in sandbox
    assert f"{limits.file_bytes >> 20} MiB each, {limits.open_files}" in sandbox
    assert f"{limits.memory_bytes >> 30} GiB of address space" in sandbox
    assert f"| processes | {limits.processes} " in sandbox
    assert f"{MAX_CHARACTERS:,} characters" in PAGE
    assert set(re.findall(r"`(\w+)`", " ".join(re.findall(r"^\| (`[^|]*) \|", PAGE, re.MULTILINE)))) >= set(METRICS)
