"""Prints the third-party requirements of all members and of the development tools, one a line, for pip.

Our own distributions are left out: they are installed from this checkout and never looked up in an index.
"""

from __future__ import annotations

import re
import tomllib
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parent.parent
MEMBERS = ("sdk", "protos", "scheduler", "service", "gpu_workers", "tests")


def requirements(root: Path) -> list[str]:
    """Every dependency, every extra, every build requirement, and the `dev` group of the root, sorted."""
    found: set[str] = set(_read(root / "pyproject.toml")["dependency-groups"]["dev"])
    ours: set[str] = set()
    for member in MEMBERS:
        content = _read(root / member / "pyproject.toml")
        project = content["project"]
        ours.add(project["name"])
        found |= {*content["build-system"]["requires"], *project["dependencies"]}
        found |= {one for extra in project.get("optional-dependencies", {}).values() for one in extra}
    return sorted(one for one in found if _name(one) not in ours)


def _read(path: Path) -> dict[str, Any]:
    return tomllib.loads(path.read_text(encoding="utf-8"))


def _name(requirement: str) -> str:
    return re.split(r"[^A-Za-z0-9._-]", requirement, maxsplit=1)[0].lower()


if __name__ == "__main__":
    print("\n".join(requirements(ROOT)))
