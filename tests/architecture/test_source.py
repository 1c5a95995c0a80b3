"""Rules of the source that no type checker knows: unsafe calls, floats near money, who may import what."""

from __future__ import annotations

import ast
import subprocess
import sys
from importlib.metadata import packages_distributions
from pathlib import Path

import pytest

from .sizes import ROOT, SHIPPED, python_files
from .source import floats, imports, unsafe_calls

OURS = {"finery", "finery_protos", "finery_scheduler", "finery_service", "finery_gpu_workers", "finery_testing"}
TEMPLATES = "gpu_workers/src/finery_gpu_workers/data/chat.py"
MONEY = ("sdk/src/finery/types/money.py", "sdk/src/finery/types/usage.py", "service/src/finery_service/usage")
ONLY_IN = {
    "ray": {
        "scheduler/src/finery_scheduler/backends/ray_driver.py",
        "gpu_workers/src/finery_gpu_workers/actor.py",
    },
    "httpx": {"sdk/src/finery/_transport.py"},
    "stripe": {"service/src/finery_service/billing/stripe_gateway.py"},
    "gguf": {
        "gpu_workers/src/finery_gpu_workers/models/catalog.py",
        "gpu_workers/src/finery_gpu_workers/models/wheel.py",
    },
}
PART_OF = {"pydantic_core": "pydantic", "starlette": "fastapi"}
MEMBERS = {
    "sdk": "finery",
    "protos": "finery-protos",
    "scheduler": "finery-scheduler",
    "service": "finery-service",
    "gpu_workers": "finery-gpu-workers",
    "tests": "finery-testing",
}


def parse(path: Path) -> ast.Module:
    return ast.parse(path.read_text(encoding="utf-8"), filename=str(path))


def name(path: Path) -> str:
    return path.relative_to(ROOT).as_posix()


def test_nothing_that_was_sent_to_us_is_ever_executed() -> None:
    found = [
        f"{name(path)}:{line}"
        for path in python_files((*SHIPPED, "bench", "examples", "tools"))
        for line in unsafe_calls(parse(path), renders_templates=name(path) == TEMPLATES)
    ]
    assert not found, "\n" + "\n".join(found)


@pytest.mark.parametrize(
    "code",
    [
        "import torch\ntorch.load('x')",
        "from torch import load\nload('x')",
        "import pickle as p\np.loads(b'')",
        "import yaml\nyaml.load('x')",
        "eval('1')",
        "exec('1')",
        "from jinja2 import Environment\nEnvironment()",
        "import jinja2\njinja2.Template('x')",
        "from jinja2.sandbox import ImmutableSandboxedEnvironment\nImmutableSandboxedEnvironment()",
        "AutoModel.from_pretrained('x', trust_remote_code=True)",
        "import subprocess\nsubprocess.run('x', shell=True)",
    ],
)
def test_each_unsafe_call_is_found(code: str) -> None:
    assert len(unsafe_calls(ast.parse(code))) == 1


@pytest.mark.parametrize(
    "code",
    [
        "model.eval()",
        "import yaml\nyaml.safe_load('x')",
        "import json\njson.load(f)",
        "AutoModel.from_pretrained('x', trust_remote_code=False)",
    ],
)
def test_what_is_safe_is_left_alone(code: str) -> None:
    assert unsafe_calls(ast.parse(code)) == []


def test_money_is_never_a_float() -> None:
    paths = list(python_files(MONEY))
    assert len(paths) > 3
    found = [f"{name(path)}:{line}" for path in paths for line in floats(parse(path))]
    assert not found, "\n" + "\n".join(found)


def test_floats_are_found() -> None:
    assert len(floats(ast.parse("a: float = 1\nb = 0.5\nc = float('1')\nd: dict[str, float]\ne = 1\nf = '0.5'"))) == 4


@pytest.mark.parametrize("package", sorted(ONLY_IN))
def test_a_package_is_imported_only_where_the_design_allows(package: str) -> None:
    found = {name(path) for path in python_files(SHIPPED) if package in imports(parse(path))}
    assert found <= ONLY_IN[package]


def test_imports_inside_functions_are_found_and_relative_ones_are_not() -> None:
    code = "import a.b\nfrom .x import y\nfrom . import z\ndef f():\n    from c.d import e\n    import g as h"
    assert imports(ast.parse(code)) == {"a", "c", "g"}


@pytest.mark.parametrize("member", sorted(MEMBERS))
def test_a_member_declares_every_package_that_it_imports(member: str, requirement_names: dict[str, set[str]]) -> None:
    """Itself or through another member; else it works in one common environment and fails where it is alone."""
    distributions = packages_distributions()
    used = set[str]().union(*(imports(parse(path)) for path in python_files((f"{member}/src",))))
    foreign = {PART_OF.get(package, package) for package in used} - sys.stdlib_module_names - OURS
    undeclared = {
        package
        for package in foreign
        if not {one.lower().replace("_", "-") for one in distributions.get(package, [package])}
        & requirement_names[MEMBERS[member]]
    }
    assert not undeclared, f"{member}/pyproject.toml lacks {sorted(undeclared)}"


def test_the_vocabulary_loads_no_http_client() -> None:
    modules = [f"finery.types.{path.stem}" for path in (ROOT / "sdk/src/finery/types").glob("[a-z]*.py")]
    loaded = "'httpx' in sys.modules, 'finery._transport' in sys.modules"
    code = f"import sys, finery.types, {', '.join(modules)}; print({loaded})"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.split() == ["False", "False"]


def test_import_contracts_hold() -> None:
    command = [str(Path(sys.executable).parent / "lint-imports"), "--no-logo", "--no-cache"]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True)
    assert done.returncode == 0, done.stdout + done.stderr
    assert " 0 broken" in done.stdout


def test_generated_messages_are_those_of_the_proto_files() -> None:
    command = [sys.executable, "protos/generate.py", "--check"]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True)
    assert done.returncode == 0, done.stdout + done.stderr
