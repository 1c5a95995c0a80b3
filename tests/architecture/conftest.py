from __future__ import annotations

import re
import tomllib

import pytest

from .sizes import ROOT

FOLDERS = ("sdk", "protos", "scheduler", "service", "gpu_workers", "tests")


@pytest.fixture(scope="session")
def requirement_names() -> dict[str, set[str]]:
    """By distribution: the names of everything it requires, extras included, and what its own requirements require."""
    found: dict[str, set[str]] = {}
    for folder in FOLDERS:
        project = tomllib.loads((ROOT / folder / "pyproject.toml").read_text(encoding="utf-8"))["project"]
        extras = project.get("optional-dependencies", {}).values()
        required = [*project["dependencies"], *(one for extra in extras for one in extra)]
        found[project["name"]] = {re.split(r"[^A-Za-z0-9._-]", one, maxsplit=1)[0].lower() for one in required}
    for all_of_it in found.values():
        while not all_of_it >= (more := {two for one in all_of_it for two in found.get(one, ())}):
            all_of_it |= more
    return found
