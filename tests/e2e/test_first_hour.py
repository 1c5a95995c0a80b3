"""A customer's first hour on the real model, word for word the acceptance script; and the README's example."""

from __future__ import annotations

import re
import subprocess
import sys
from pathlib import Path

import pytest

from finery_testing.stack import Stack

pytestmark = pytest.mark.e2e
ROOT = Path(__file__).parents[2]


def run(stack: Stack, *arguments: str, cwd: Path) -> str:
    done = subprocess.run(
        [sys.executable, *arguments], env=stack.environment(), cwd=cwd, capture_output=True, text=True, timeout=280
    )
    assert done.returncode == 0, f"{arguments} exited with {done.returncode}\n{done.stdout}\n{done.stderr}"
    return done.stdout


def test_first_hour(stack: Stack, tmp_path: Path) -> None:
    script = str(ROOT / "tests/acceptance/first_hour.py")
    assert "first hour passed: sft dpo rl" in run(stack, script, "sft", "dpo", "rl", cwd=tmp_path)


def test_the_readme_example_runs_as_printed(stack: Stack) -> None:
    readme = (ROOT / "README.md").read_text(encoding="utf-8")
    blocks = re.findall(r"<!-- executed by tests/e2e/test_first_hour.py -->\s*```python\n(.*?)```", readme, re.DOTALL)
    assert len(blocks) == 1, "the README holds one example that this test executes"
    code = blocks[0]
    assert len([line for line in code.splitlines() if line.strip()]) <= 15, "the README promises 15 lines"
    run(stack, "-c", code, cwd=ROOT)
