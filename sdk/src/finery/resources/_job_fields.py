"""The fields of `jobs.create`, for editors and type checkers. What they mean is in `finery.types.methods`."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, Literal, TypedDict

from finery.types.checkpoints import Checkpoint
from finery.types.environments import Environment, EnvironmentSpec
from finery.types.files import File
from finery.types.methods import (
    Adapter,
    DpoHyperparameters,
    Limits,
    Resources,
    RlHyperparameters,
    SftHyperparameters,
)
from finery.types.models import Model


class JobFields(TypedDict, total=False):
    method: Literal["sft", "dpo", "rl"]
    model: Model | str
    from_checkpoint: Checkpoint | str | None
    merge_checkpoint: bool
    training_file: File | str
    """SFT and DPO."""
    validation_file: File | str | None
    """SFT and DPO."""
    environment: Environment | EnvironmentSpec | Mapping[str, Any] | str
    """RL: one of yours (or its id), or one as it would be created."""
    name: str | None
    project: str | None
    seed: int
    metadata: Mapping[str, str]
    adapter: Adapter | Mapping[str, Any]
    added_tokens: Sequence[str]
    export_merged: bool
    hyperparameters: SftHyperparameters | DpoHyperparameters | RlHyperparameters | Mapping[str, Any]
    resources: Resources | Mapping[str, Any]
    priority: Literal["low", "normal", "high"]
    limits: Limits | Mapping[str, Any]
