"""Tasks of reasoning-gym: its code runs in the sandbox, as it parses what models write, and is loaded nowhere else."""

from __future__ import annotations

import importlib.util
import sysconfig
from typing import Any

from finery.types.environments import ReasoningGymEnvironment
from finery_gpu_workers.environments.calls import Function
from finery_gpu_workers.errors import WorkerError
from finery_gpu_workers.sandbox.limits import Limits

_LIMITS = Limits(memory_bytes=4 * 2**30, reply_bytes=2**25)


def function_of(spec: ReasoningGymEnvironment) -> Function:
    """Makes rows and scores answers: `load_reasoning_gym` in harness.py.

    Raises WorkerError `invalid_environment` where the package is missing.
    """
    if importlib.util.find_spec("reasoning_gym") is None:
        message = "environment.type: the workers lack the package reasoning-gym; ask the operator to install it."
        raise WorkerError("invalid_environment", message, param="environment.type")
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


def refused(spec: ReasoningGymEnvironment, why: str) -> WorkerError:
    """`why` is what its code said, perhaps with a traceback."""
    lines = why.strip().splitlines() or ["no reason given"]
    param = "environment.task" if lines[-1].startswith("expected a task") else "environment"
    message = f"{param}: reasoning_gym refuses {spec.task} as it is configured: {lines[-1][:500]}"
    return WorkerError("invalid_environment", message, param=param)
