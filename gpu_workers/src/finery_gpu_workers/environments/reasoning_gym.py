"""Tasks of reasoning-gym: its code runs in the sandbox, as it parses what models write, and is loaded nowhere else."""

from __future__ import annotations

import importlib.util
import sysconfig
from typing import Any

from finery.types.environments import ReasoningGymEnvironment
from finery_gpu_workers.environments.calls import Function, LoadError
from finery_gpu_workers.errors import WorkerError
from finery_gpu_workers.sandbox.limits import Limits

_LIMITS = Limits(memory_bytes=4 * 2**30)


def tasks(spec: ReasoningGymEnvironment) -> Function:
    """The function that makes rows and scores answers (`load_reasoning_gym` in harness.py), started.

    Raises WorkerError `invalid_environment`, `sandbox_unavailable`.
    """
    if importlib.util.find_spec("reasoning_gym") is None:
        message = "environment.type: the workers lack the package reasoning-gym; ask the operator to install it."
        raise WorkerError("invalid_environment", message, param="environment.type")
    function = function_of(spec)
    try:
        function.start()
    except LoadError as error:
        param = "environment.task" if "expected a task" in str(error) else "environment"
        message = f"{param}: reasoning_gym refuses {spec.task} with this config: {_last_line(str(error))}"
        raise WorkerError("invalid_environment", message, param=param) from None
    return function


def function_of(spec: ReasoningGymEnvironment) -> Function:
    paths = sorted({sysconfig.get_path("purelib"), sysconfig.get_path("platlib")})
    setup: dict[str, Any] = {
        "kind": "reasoning_gym",
        "paths": paths,
        "task": spec.task,
        "config": {name: value for name, value in spec.config.items() if name not in ("seed", "size")},
        "seed": spec.seed,
        "pattern": spec.answer_pattern,
    }
    return Function(setup, limits=_LIMITS, read=paths)


def _last_line(text: str) -> str:
    lines = text.strip().splitlines()
    return lines[-1][:500] if lines else "no reason given"
