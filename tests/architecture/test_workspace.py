"""The workspace as a whole: layout, pins, commands."""

from __future__ import annotations

import re
import runpy
import subprocess
import tomllib
from typing import Any

import pytest

from .conftest import FOLDERS
from .sizes import ROOT

TOP = (*FOLDERS, "bench", "deploy", "docs", "examples", "tools")


def constraints() -> dict[str, str]:
    lines = (ROOT / "constraints.txt").read_text(encoding="utf-8").splitlines()
    pins = [line.split("==") for line in lines if line and not line.startswith("#")]
    return {name.lower().replace("_", "-"): version for name, version in pins}


def projects() -> dict[str, dict[str, Any]]:
    return {
        folder: tomllib.loads((ROOT / folder / "pyproject.toml").read_text(encoding="utf-8"))["project"]
        for folder in FOLDERS
    }


def test_top_folders_are_no_packages() -> None:
    assert not [folder for folder in TOP if (ROOT / folder / "__init__.py").exists()]
    assert not [path for path in ROOT.glob("*/*/__init__.py") if path.parent.parent.name in TOP]


def test_the_repository_root_holds_no_code() -> None:
    assert not list(ROOT.glob("*.py"))


def test_every_requirement_of_the_workspace_is_pinned() -> None:
    listed = runpy.run_path(str(ROOT / "tools/requirements.py"))["requirements"](ROOT)
    pins = constraints()
    names = {re.split(r"[^A-Za-z0-9._-]", line, maxsplit=1)[0].lower() for line in listed}
    assert names - set(pins) == set()
    assert {"torch", "ray", "hatchling", "ruff", "pytest"} <= names
    assert not {name for name in names if name.startswith("finery")}, "ours are never asked of an index"


def test_torch_is_pinned_without_a_local_version() -> None:
    assert "+" not in constraints()["torch"]


def test_all_members_have_one_version_licence_and_python() -> None:
    found = {(one["version"], one["license"], one["requires-python"]) for one in projects().values()}
    assert found == {("0.1.0", "Apache-2.0", ">=3.11")}


def test_every_member_is_typed() -> None:
    packages = [path.parent for path in ROOT.glob("*/src/*/py.typed")]
    assert len(packages) == len(FOLDERS)


def test_make_help_lists_every_target() -> None:
    makefile = (ROOT / "Makefile").read_text(encoding="utf-8")
    (phony,) = re.findall(r"^\.PHONY: (.*)$", makefile, re.MULTILINE)
    done = subprocess.run(["make", "-s"], cwd=ROOT, capture_output=True, text=True, check=True)
    names = (line.strip().removeprefix("make ").split("  ")[0] for line in done.stdout.splitlines())
    listed = {target for name in names for target in name.split()}
    assert listed == set(phony.split())
    assert {"demo", "test", "test-slow", "check", "protos", "bench"} <= listed


@pytest.mark.parametrize("target", ["check", "test", "test-slow"])
def test_ci_runs_the_developers_commands(target: str) -> None:
    (targets,) = re.findall(r"^for target in (.*); do$", (ROOT / ".ci/run").read_text(encoding="utf-8"), re.MULTILINE)
    assert target in targets.split()
