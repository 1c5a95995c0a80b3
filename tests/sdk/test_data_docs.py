"""The table of codes in docs/data.md is the list of codes that rows and files can be told."""

from __future__ import annotations

import ast
import re
from pathlib import Path

ROOT = Path(__file__).parents[2]
SOURCES = [*(ROOT / "sdk/src/finery/data").glob("*.py"), ROOT / "service/src/finery_service/files/checks.py"]
_CODE = re.compile(r"[a-z][a-z0-9]*(_[a-z0-9]+)+")
_MAKERS = {"RowError": 0, "Flaw": 1, "_mark": 0, "_refused": 0}
"""What makes a problem, and which of its arguments is the code; `Problem` has it by name."""


def codes(source: str) -> set[str]:
    found = set()
    for node in ast.walk(ast.parse(source)):
        if not isinstance(node, ast.Call):
            continue
        name = node.func.attr if isinstance(node.func, ast.Attribute) else getattr(node.func, "id", "")
        given = [keyword.value for keyword in node.keywords if keyword.arg == "code" and name == "Problem"]
        if name in _MAKERS:
            given.append(node.args[_MAKERS[name]])
        found |= {one.value for one in given if isinstance(one, ast.Constant) and isinstance(one.value, str)}
    return found


def test_the_table_of_codes_is_complete_and_has_no_other() -> None:
    page = (ROOT / "docs/data.md").read_text(encoding="utf-8")
    documented = re.findall(r"^\| `([a-z0-9_]+)` \|", page.partition("## Codes")[2], re.MULTILINE)
    made = set().union(*(codes(path.read_text(encoding="utf-8")) for path in SOURCES))
    assert documented == sorted(documented)
    assert all(_CODE.fullmatch(code) for code in made)
    assert set(documented) == made
