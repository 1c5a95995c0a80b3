"""What a customer may ask for: the methods, told apart by `method`."""

from __future__ import annotations

from typing import Annotated

from pydantic import Field

from finery.types.base import Name, Request
from finery.types.dpo import DpoHyperparameters, DpoJobCreate
from finery.types.rl import RlHyperparameters, RlJobCreate
from finery.types.sft import SftHyperparameters, SftJobCreate, TrainOn
from finery.types.spec import (
    Adapter,
    AddedToken,
    EmbeddingName,
    FullWeights,
    JobSpec,
    Limits,
    LinearName,
    LoraAdapter,
    Metadata,
    Optimization,
    Passes,
    Resources,
    Schedule,
    Truncation,
)

__all__ = [
    "Adapter",
    "AddedToken",
    "DpoHyperparameters",
    "DpoJobCreate",
    "EmbeddingName",
    "FullWeights",
    "JobCreate",
    "JobSpec",
    "JobUpdate",
    "Limits",
    "LinearName",
    "LoraAdapter",
    "Metadata",
    "Optimization",
    "Passes",
    "Resources",
    "RlHyperparameters",
    "RlJobCreate",
    "Schedule",
    "SftHyperparameters",
    "SftJobCreate",
    "TrainOn",
    "Truncation",
]

JobCreate = Annotated[SftJobCreate | DpoJobCreate | RlJobCreate, Field(discriminator="method")]
"""The body of `POST /v1/jobs`; read it with `pydantic.TypeAdapter(JobCreate)`."""


class JobUpdate(Request):
    """The body of `PATCH /v1/jobs/{id}`: what is given is set, what is left out stays."""

    name: Name | None = None
    """Null takes the name away."""
    metadata: Metadata = {}
    """Replaces all metadata."""
