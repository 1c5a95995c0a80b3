"""The README's longer example, its parts one after the other as a reader would run them, on the tiny model."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

from finery import Finery
from finery_testing.stack import Stack

from .conftest import add_model

pytestmark = pytest.mark.e2e
ROOT = Path(__file__).parents[2]
MARK = "<!-- executed by tests/e2e/test_readme.py -->"


def test_the_readmes_examples_run_as_printed(stack: Stack, client: Finery, tmp_path: Path) -> None:
    add_model(stack, "my-model")
    readme = (ROOT / "README.md").read_text(encoding="utf-8")
    parts = re.findall(rf"{MARK}\n```python\n(.*?)```", readme, re.DOTALL)
    assert len(parts) == readme.count(MARK) == 6
    (tmp_path / "examples").symlink_to(ROOT / "examples")
    done = subprocess.run(
        [sys.executable, "-c", "".join(parts)],
        env={**os.environ, **stack.environment()},
        cwd=tmp_path,
        capture_output=True,
        text=True,
        timeout=200,
    )
    assert done.returncode == 0, f"{done.stdout}\n{done.stderr}"
    shown = re.sub(r"\x1b\[[0-9;]*m", "", done.stdout)
    assert "bacon would be more scarce" in shown, "the preview shows the first row"
    assert "{'exact'" not in shown, "rewards are shown in a table"
    assert '{"word": "apple"}' in shown
    rl, dpo, lora, full = list(client.jobs.list(limit=4))[:4]
    assert [job.state for job in (rl, dpo, lora, full)] == ["succeeded"] * 4
    assert full.adapter["type"] == "full"
    assert [job.method for job in (rl, dpo)] == ["rl", "dpo"]
    assert lora.from_checkpoint == full.best_checkpoint
    assert (tmp_path / "out/lora/merged/model.safetensors").exists()
    assert (tmp_path / "out/lora/adapter_model.safetensors").exists()
