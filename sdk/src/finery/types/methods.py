"""What a customer may ask for. Every hyper-parameter is declared here once, with default, bounds, meaning."""

from __future__ import annotations

from typing import Annotated, Literal

from pydantic import Field, StringConstraints, model_validator

from finery.types.base import Request
from finery.types.ids import CheckpointId, FileId, ProjectId
from finery.types.money import Usd

Schedule = Literal["linear", "cosine", "constant"]
TrainOn = Literal["assistant", "last", "all"]
LinearName = Literal["q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj"]


class LoraAdapter(Request):
    """Low-rank adapters, W + (alpha / rank) B A (Hu et al. 2021, arXiv:2106.09685)."""

    type: Literal["lora"] = "lora"
    rank: Annotated[int, Field(ge=1, le=256)] = 16
    alpha: Annotated[float, Field(gt=0, le=1024)] = 32.0
    targets: Literal["all-linear"] | Annotated[tuple[LinearName, ...], Field(min_length=1, strict=False)] = "all-linear"
    """Which linear layers of every block get an adapter."""


class SftHyperparameters(Request):
    epochs: Annotated[int, Field(ge=1, le=100)] = 1
    """Passes over the training file. Ignored when `max_steps` is given."""
    max_steps: Annotated[int, Field(ge=1, le=1_000_000)] | None = None
    """Optimizer updates; the data is repeated as often as needed."""
    batch_tokens: Annotated[int, Field(ge=16, le=16_777_216)] = 8192
    """Tokens per optimizer update, padding not counted. Rows are never split over two updates."""
    micro_batch_tokens: Annotated[int, Field(ge=16, le=1_048_576)] | None = None
    """Tokens per forward pass (memory); None lets the worker choose. Never changes the gradient."""
    max_length: Annotated[int, Field(ge=2, le=131_072)] = 2048
    """Longer rows are cut on the right."""
    learning_rate: Annotated[float, Field(gt=0, le=1)] = 2e-4
    schedule: Schedule = "cosine"
    warmup_ratio: Annotated[float, Field(ge=0, lt=1)] = 0.03
    """Part of all steps with a linearly rising learning rate."""
    weight_decay: Annotated[float, Field(ge=0, le=1)] = 0.0
    """Decoupled (AdamW)."""
    max_grad_norm: Annotated[float, Field(gt=0)] | None = 1.0
    """Global L2 norm to clip gradients to; None does not clip."""
    train_on: TrainOn = "assistant"
    """Whose tokens carry loss: every assistant turn, the last one, or all."""
    checkpoint_every: Annotated[int, Field(ge=1)] = 50
    """Steps between checkpoints; the last step always has one."""
    eval_every: Annotated[int, Field(ge=1)] | None = None
    """Steps between evaluations on the validation file; None evaluates before the first and after the last."""


class Resources(Request):
    accelerators: Annotated[int, Field(ge=1, le=1024)] = 1
    accelerator_type: Annotated[str, StringConstraints(min_length=1, max_length=64)] | None = None


class Limits(Request):
    """Caps; the job checkpoints and pauses before it would pass one."""

    max_cost: Usd | None = None
    max_tokens: Annotated[int, Field(ge=1)] | None = None
    max_seconds: Annotated[int, Field(ge=1)] | None = None


Name = Annotated[str, StringConstraints(min_length=1, max_length=128)]
MetadataKey = Annotated[str, StringConstraints(min_length=1, max_length=64)]
MetadataValue = Annotated[str, StringConstraints(max_length=512)]


class SftJobCreate(Request):
    """The body of `POST /v1/jobs`."""

    method: Literal["sft"]
    model: Annotated[str, StringConstraints(min_length=1, max_length=256)] | None = None
    """Name or id of a base model in the catalogue. Exactly one of `model` and `from_checkpoint`."""
    from_checkpoint: CheckpointId | None = None
    """Start from this checkpoint: the same adapter goes on, the optimizer starts fresh."""
    training_file: FileId
    validation_file: FileId | None = None
    name: Name | None = None
    project: ProjectId | None = None
    seed: Annotated[int, Field(ge=0, lt=2**63)] = 0
    metadata: Annotated[dict[MetadataKey, MetadataValue], Field(max_length=16)] = {}
    adapter: LoraAdapter = LoraAdapter()
    hyperparameters: SftHyperparameters = SftHyperparameters()
    resources: Resources = Resources()
    priority: Literal["low", "normal", "high"] = "normal"
    limits: Limits = Limits()

    @model_validator(mode="after")
    def _one_start(self) -> SftJobCreate:
        if (self.model is None) == (self.from_checkpoint is None):
            found = "neither" if self.model is None else "both"
            raise ValueError(f"expected exactly one of model and from_checkpoint, found {found}")
        return self


JobCreate = SftJobCreate
"""All methods; a union discriminated by `method` once there is more than one."""
