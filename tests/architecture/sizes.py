"""Lines of every file and function of the workspace, and the record of those over target, which may only fall.

python tests/architecture/sizes.py            # records sizes that fell, drops what is back under target
python tests/architecture/sizes.py --accept   # also records what is newly over target: say why in the commit
"""

from __future__ import annotations

import ast
import json
import sys
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
RECORD = Path(__file__).with_name("ratchet.json")
SHIPPED = ("sdk/src", "protos/generate.py", "scheduler/src", "service/src", "gpu_workers/src")
OTHERS = ("service/migrations", "tests", "bench", "examples", "tools")
FILE_TARGET, FILE_HARD = 300, 500
FUNCTION_TARGET, FUNCTION_HARD, METHODS_HARD = 40, 60, 100


@dataclass(frozen=True)
class Size:
    """Lines of a file (`path`) or of a function (`path::Class.function`), decorators not counted."""

    name: str
    lines: int
    target: int
    hard: int


def python_files(roots: tuple[str, ...], root: Path = ROOT) -> Iterator[Path]:
    """Our own Python files under `roots`; generated code and what lies in hidden folders (`.venv`) are not ours."""
    for place in roots:
        top = root / place
        for path in _below(top) if top.is_dir() else [top]:
            if not path.name.endswith(("_pb2.py", "_pb2_grpc.py")):
                yield path


def _below(folder: Path) -> Iterator[Path]:
    for path in sorted(folder.iterdir()):
        if path.is_dir() and not path.name.startswith("."):
            yield from _below(path)
        elif path.suffix == ".py":
            yield path


def functions(tree: ast.AST, prefix: str = "") -> Iterator[tuple[str, int]]:
    """Qualified name and lines of every function, nested ones too (they count for the outer one as well)."""
    for node in ast.iter_child_nodes(tree):
        name = prefix
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef):
            name = f"{prefix}.{node.name}" if prefix else node.name
            if not isinstance(node, ast.ClassDef):
                yield name, (node.end_lineno or node.lineno) - node.lineno + 1
        yield from functions(node, name)


def measure(path: Path, root: Path = ROOT) -> Iterator[Size]:
    text = path.read_text(encoding="utf-8")
    name = path.relative_to(root).as_posix()
    yield Size(name, len(text.splitlines()), FILE_TARGET, FILE_HARD)
    hard = METHODS_HARD if "/methods/" in name else FUNCTION_HARD
    for function, lines in functions(ast.parse(text)):
        yield Size(f"{name}::{function}", lines, FUNCTION_TARGET, hard)


def violations(sizes: list[Size], record: dict[str, int]) -> list[str]:
    """What breaks the contract, each with what to do."""
    found = []
    for size in sizes:
        allowed = record.get(size.name, size.target)
        if size.lines > size.hard:
            found.append(f"{size.name}: {size.lines} lines, the limit is {size.hard}; split it")
        elif size.lines > allowed:
            found.append(f"{size.name}: {size.lines} lines, allowed are {allowed}; split it")
        elif size.name in record and size.lines < allowed:
            found.append(f"{size.name}: {size.lines} lines, recorded are {allowed}; run `make ratchet`")
    gone = sorted(set(record) - {size.name for size in sizes})
    return found + [f"{name}: recorded, but it does not exist; run `make ratchet`" for name in gone]


def lowered(sizes: list[Size], record: dict[str, int], *, accept: bool = False) -> dict[str, int]:
    """The new record: entries fall or go; new ones come only with `accept`."""
    over = {size.name: size.lines for size in sizes if size.target < size.lines <= size.hard}
    return {
        name: min(lines, record.get(name, lines)) for name, lines in sorted(over.items()) if name in record or accept
    }


def read_record() -> dict[str, int]:
    content: dict[str, int] = json.loads(RECORD.read_text(encoding="utf-8"))
    return content


def all_sizes() -> list[Size]:
    return [size for path in python_files(SHIPPED + OTHERS) for size in measure(path)]


if __name__ == "__main__":
    new = lowered(all_sizes(), read_record(), accept="--accept" in sys.argv)
    RECORD.write_text(json.dumps(new, indent=2) + "\n", encoding="utf-8")
    print("\n".join(violations(all_sizes(), new)) or f"{len(new)} recorded exceptions, no violation")
