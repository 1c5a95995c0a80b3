from __future__ import annotations

import pkgutil
import subprocess
import sys

import pytest

import finery
import finery.types


def run(code: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=60)


def test_importing_the_vocabulary_loads_no_http_client() -> None:
    modules = [module.name for module in pkgutil.iter_modules(finery.types.__path__)]
    assert {"base", "files", "jobs", "methods", "previews", "data"} <= set(modules)
    imports = ", ".join(f"finery.types.{module}" for module in modules)
    ours = "'finery._transport', 'finery._preview', 'finery._environment_run', 'finery.graders'"
    heavy = f"{{'httpx', 'httpcore', {ours}, 'typer', 'rich', 'matplotlib', 'pyarrow'}}"
    done = run(f"import sys, finery, {imports}\nfound = {heavy} & set(sys.modules)\nassert not found, found")
    assert done.returncode == 0, done.stderr


def test_every_public_name_is_there_and_no_other() -> None:
    for name in finery.__all__:
        assert getattr(finery, name).__name__ in (name, f"finery.{name}")
    assert set(finery.__all__) <= set(dir(finery))
    with pytest.raises(AttributeError, match="no attribute 'Nonsense'"):
        _ = finery.Nonsense


def test_the_client_needs_none_of_the_extras() -> None:
    extras = "'typer', 'rich', 'matplotlib', 'pyarrow', 'tensorboard', 'wandb', 'mlflow'"
    block = f"for m in ({extras}): sys.modules[m] = None"
    done = run(f"import sys\n{block}\nfrom finery import Finery; Finery('k')")
    assert done.returncode == 0, done.stderr


def test_the_command_says_which_extra_is_missing() -> None:
    done = run("import sys; sys.modules['typer'] = None\nfrom finery.cli import main; main(['usage'])")
    assert done.returncode == 2
    assert done.stderr.strip() == 'The command needs typer, which is not installed. Run: pip install "finery[cli]"'


def test_drawing_says_which_extra_is_missing() -> None:
    code = """
import sys; sys.modules['matplotlib'] = None; sys.modules['matplotlib.figure'] = None
from finery.plot import loss_curve
from finery.types.jobs import Event
event = Event(job="j", seq=1, type="metric", data={"step": 1, "loss": 1.0}, created_at="2026-11-30T12:00:00Z")
try: loss_curve([event], "/tmp/x.png")
except ImportError as error: assert 'pip install "finery[plot]"' in str(error); sys.exit(7)
"""
    assert run(code).returncode == 7
