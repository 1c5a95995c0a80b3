"""What the architecture tests look for in a file's syntax tree. Each finding is `line: what`."""

from __future__ import annotations

import ast
from collections.abc import Iterator

FORBIDDEN_CALLS = {
    "torch.load": "unpickles; use safetensors",
    "pickle.load": "runs what it reads",
    "pickle.loads": "runs what it reads",
    "marshal.loads": "runs what it reads",
    "yaml.load": "runs what it reads; use yaml.safe_load",
    "yaml.unsafe_load": "runs what it reads; use yaml.safe_load",
    "eval": "runs what it reads",
    "exec": "runs what it reads",
}
JINJA = ("jinja2.Environment", "jinja2.Template")
SANDBOXES = ("jinja2.sandbox.SandboxedEnvironment", "jinja2.sandbox.ImmutableSandboxedEnvironment")


def imports(tree: ast.AST) -> set[str]:
    """Top-level names of everything imported anywhere in the tree, inside functions too."""
    found: set[str] = set()
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            found |= {alias.name.split(".")[0] for alias in node.names}
        elif isinstance(node, ast.ImportFrom) and node.level == 0 and node.module:
            found.add(node.module.split(".")[0])
    return found


def _names(tree: ast.AST) -> dict[str, str]:
    """What each imported local name stands for: `np` → `numpy`, `Environment` → `jinja2.Environment`."""
    names: dict[str, str] = {}
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            for alias in node.names:
                names[alias.asname or alias.name.split(".")[0]] = (
                    alias.name if alias.asname else alias.name.split(".")[0]
                )
        elif isinstance(node, ast.ImportFrom) and node.module:
            names |= {alias.asname or alias.name: f"{node.module}.{alias.name}" for alias in node.names}
    return names


def _dotted(node: ast.expr) -> str:
    if isinstance(node, ast.Name):
        return node.id
    if isinstance(node, ast.Attribute) and (rest := _dotted(node.value)):
        return f"{rest}.{node.attr}"
    return ""


def calls(tree: ast.AST) -> Iterator[tuple[ast.Call, str]]:
    """Every call with the full dotted name of what is called, imports resolved."""
    names = _names(tree)
    for node in ast.walk(tree):
        if isinstance(node, ast.Call) and (dotted := _dotted(node.func)):
            head, _, rest = dotted.partition(".")
            resolved = names.get(head, head)
            yield node, f"{resolved}.{rest}" if rest else resolved


def unsafe_calls(tree: ast.AST, *, renders_templates: bool = False) -> list[str]:
    """Calls that would run what a customer sent. Only one module renders templates, and that in a sandbox."""
    found = []
    for node, name in calls(tree):
        if name in FORBIDDEN_CALLS:
            found.append(f"{node.lineno}: {name} {FORBIDDEN_CALLS[name]}")
        if name in JINJA or (name in SANDBOXES and not renders_templates):
            found.append(f"{node.lineno}: {name}: templates are rendered in data/chat.py's sandbox only")
        for keyword in node.keywords:
            if keyword.arg == "trust_remote_code" and not _is_constant(keyword.value, False):
                found.append(f"{node.lineno}: trust_remote_code is never on")
            if keyword.arg == "shell" and not _is_constant(keyword.value, False):
                found.append(f"{node.lineno}: no shell between us and a program")
    return found


def _is_constant(node: ast.expr, value: object) -> bool:
    return isinstance(node, ast.Constant) and node.value is value


def floats(tree: ast.AST) -> list[str]:
    """Every float constant and every mention of the type `float`, annotations included."""
    found = []
    for node in ast.walk(tree):
        if isinstance(node, ast.Constant) and isinstance(node.value, float):
            found.append(f"{node.lineno}: the float {node.value}")
        elif isinstance(node, ast.Name) and node.id == "float":
            found.append(f"{node.lineno}: float")
    return found
