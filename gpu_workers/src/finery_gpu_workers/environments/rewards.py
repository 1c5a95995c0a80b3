"""What rewards an environment's answers."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from functools import partial
from pathlib import Path

from finery.templates import TemplateError
from finery.types.environments import (
    EnvironmentSpec,
    MultiGrader,
    PythonGrader,
    ReasoningGymEnvironment,
    ScoreModelGrader,
    SingleGrader,
)
from finery.types.environments import Grader as GraderSpec
from finery_gpu_workers.environments.calls import LoadError
from finery_gpu_workers.environments.formula_grader import Combined
from finery_gpu_workers.environments.graders import Compared, Grader, Sandboxed, Task
from finery_gpu_workers.environments.judge import Judge
from finery_gpu_workers.environments.pool import Pool
from finery_gpu_workers.environments.reasoning_gym import refused
from finery_gpu_workers.environments.types import Rewards
from finery_gpu_workers.errors import WorkerError


def open_rewards(
    spec: EnvironmentSpec, folder: Path, *, workers: int, score_models: Mapping[str, str | None]
) -> Rewards:
    """`workers` grade at a time. `score_models`: what the operator allows, base URL to API key. Code is loaded once
    before this returns, so that what cannot be loaded is an error here. Nothing is written to `folder` as yet.

    Raises WorkerError `invalid_environment`, `sandbox_unavailable`.
    """
    del folder
    make: Callable[[], Grader] = (
        partial(Task, spec) if isinstance(spec, ReasoningGymEnvironment) else partial(build, spec.grader, score_models)
    )
    first = make()
    try:
        first.start()
    except LoadError as error:
        raise refusal(spec, str(error)) from None
    return Pool(first, make, workers)


def refusal(spec: EnvironmentSpec, why: str) -> WorkerError:
    if isinstance(spec, ReasoningGymEnvironment):
        return refused(spec, why)
    message = f"environment.grader.source: expected Python that loads, found: {why}"
    return WorkerError("invalid_environment", message, param="environment.grader.source")


def build(spec: GraderSpec, score_models: Mapping[str, str | None]) -> Grader:
    """Raises WorkerError `invalid_environment` for a text, a formula or an address that cannot be used."""
    try:
        if isinstance(spec, MultiGrader):
            return Combined(spec, {name: _single(part, score_models) for name, part in spec.graders.items()})
        return _single(spec, score_models)
    except TemplateError as error:
        raise WorkerError("invalid_environment", f"environment.grader: {error}", param="environment.grader") from None


def _single(spec: SingleGrader, score_models: Mapping[str, str | None]) -> Grader:
    if isinstance(spec, PythonGrader):
        return Sandboxed(spec)
    if isinstance(spec, ScoreModelGrader):
        return Judge(spec, score_models)
    return Compared(spec)
