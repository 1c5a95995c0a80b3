"""What rewards an environment's answers."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from pathlib import Path

from finery.templates import TemplateError
from finery.types.environments import (
    EnvironmentSpec,
    PythonGrader,
    ReasoningGymEnvironment,
    StringCheckGrader,
    TextSimilarityGrader,
)
from finery.types.environments import Grader as GraderSpec
from finery_gpu_workers.environments.calls import LoadError
from finery_gpu_workers.environments.graders import Compared, Grader, Sandboxed, Task
from finery_gpu_workers.environments.pool import Pool
from finery_gpu_workers.environments.reasoning_gym import tasks
from finery_gpu_workers.environments.types import Rewards
from finery_gpu_workers.errors import WorkerError


def open_rewards(
    spec: EnvironmentSpec, folder: Path, *, workers: int, score_models: Mapping[str, str | None]
) -> Rewards:
    """`workers` grade at a time. `score_models`: what the operator allows, base URL to API key. Code is loaded once
    before this returns, so that what cannot be loaded is an error here.

    Raises WorkerError `invalid_environment`, `sandbox_unavailable`.
    """
    make: Callable[[], Grader]
    if isinstance(spec, ReasoningGymEnvironment):
        tasks(spec).close()
        make = lambda: Task(spec)  # noqa: E731
    else:
        make = lambda: build(spec.grader, score_models)  # noqa: E731
    first = make()
    try:
        if isinstance(first, Sandboxed):
            first.start()
    except LoadError as error:
        first.close()
        message = f"environment.grader.source: expected Python that loads, found: {error}"
        raise WorkerError("invalid_environment", message, param="environment.grader.source") from None
    return Pool(first, make, workers)


def build(spec: GraderSpec, score_models: Mapping[str, str | None]) -> Grader:
    try:
        if isinstance(spec, StringCheckGrader | TextSimilarityGrader):
            return Compared(spec)
        if isinstance(spec, PythonGrader):
            return Sandboxed(spec)
    except TemplateError as error:
        raise WorkerError("invalid_environment", f"environment.grader: {error}", param="environment.grader") from None
    raise NotImplementedError(spec.type)
