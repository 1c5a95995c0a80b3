"""What jobs of all methods share: where they start, what they train, how they optimise. Declared once, here."""

from __future__ import annotations

from typing import Annotated, Literal, Self

from pydantic import Discriminator, Field, StringConstraints, Tag, model_validator

from finery.types.base import Name, Request
from finery.types.ids import CheckpointId, ProjectId
from finery.types.money import Usd

Schedule = Literal["linear", "cosine", "constant", "wsd"]
Truncation = Literal["right", "left", "drop", "error"]
LinearName = Literal["q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj"]
EmbeddingName = Literal["embed_tokens", "lm_head"]


class LoraAdapter(Request):
    """Low-rank adapters, W + (alpha / rank) B A (Hu et al. 2021, arXiv:2106.09685)."""

    type: Literal["lora"] = "lora"
    rank: Annotated[int, Field(ge=1, le=256)] = 16
    alpha: Annotated[float, Field(gt=0, le=1024)] = 32.0
    targets: Literal["all-linear"] | Annotated[tuple[LinearName, ...], Field(min_length=1, strict=False)] = "all-linear"
    """Which linear layers of every block get an adapter."""
    modules_to_save: Annotated[tuple[EmbeddingName, ...], Field(strict=False)] = ()
    """Matrices that are trained whole next to the adapter. A tied output matrix becomes one of its own with `lm_head`.
    Servers that load adapters (vLLM) refuse such a one: ask for `export_merged`."""


class FullWeights(Request):
    """All weights are trained; a checkpoint is a whole model."""

    type: Literal["full"]


def _adapter_type(value: object) -> object:
    return value.get("type", "lora") if isinstance(value, dict) else getattr(value, "type", None)


Adapter = Annotated[
    Annotated[LoraAdapter, Tag("lora")] | Annotated[FullWeights, Tag("full")],
    Discriminator(
        _adapter_type,
        custom_error_type="adapter_type",
        custom_error_message="expected one of 'lora', 'full' as type",
    ),
]
"""Without a `type` it is `lora`."""


class Optimization(Request):
    """Hyper-parameters of every method."""

    learning_rate: Annotated[float, Field(gt=0, le=1)] = 2e-4
    schedule: Schedule = "cosine"
    warmup_ratio: Annotated[float, Field(ge=0, lt=1)] = 0.03
    """Part of all steps with a linearly rising learning rate."""
    decay_ratio: Annotated[float, Field(gt=0, le=1)] = 0.2
    """`wsd` only: part of all steps, at the end, with a linearly falling learning rate."""
    weight_decay: Annotated[float, Field(ge=0, le=1)] = 0.0
    """Decoupled (AdamW)."""
    max_grad_norm: Annotated[float, Field(gt=0)] | None = 1.0
    """Global L2 norm to clip gradients to; None does not clip."""
    micro_batch_tokens: Annotated[int, Field(ge=16, le=1_048_576)] | None = None
    """Tokens per forward pass (memory); None lets the worker choose. Never changes the gradient."""
    checkpoint_every: Annotated[int, Field(ge=1)] = 50
    """Steps between checkpoints; the last step always has one."""
    eval_every: Annotated[int, Field(ge=1)] | None = None
    """Steps between evaluations on what is held out (`validation_file`; for RL `eval_prompts`); None evaluates before
    the first step, at every checkpoint and after the last. With a number, at every checkpoint too: so every checkpoint
    has been evaluated."""
    early_stopping_patience: Annotated[int, Field(ge=1)] | None = None
    """End the job, successfully, after this many evaluations in a row without a better one. Needs something held
    out."""
    early_stopping_min_delta: Annotated[float, Field(ge=0)] = 0.0
    """How much better an evaluation must be to count as better: nats per token (SFT), nats per pair (DPO), reward
    (RL)."""


class Passes(Optimization):
    """Hyper-parameters of the methods that pass over a file: SFT and DPO."""

    epochs: Annotated[int, Field(ge=1, le=100)] = 1
    """Passes over the training file. Ignored when `max_steps` is given."""
    max_steps: Annotated[int, Field(ge=1, le=1_000_000)] | None = None
    """Optimizer updates; the data is repeated as often as needed."""
    batch_tokens: Annotated[int, Field(ge=16, le=16_777_216)] = 8192
    """Tokens per optimizer update, padding not counted. Rows are never split over two updates, nor are pairs, whose
    shared prompt counts once."""
    max_length: Annotated[int, Field(ge=2, le=131_072)] = 2048
    """Tokens of a row (of prompt and answer, in pairs); see `truncation` for longer ones. Left out, it is 2048, or what
    the model takes at most where that is less; the job shows which."""
    truncation: Truncation = "right"
    """What happens to rows longer than `max_length`: keep their first tokens (`right`: the end is cut), keep their last
    ones (`left`), leave them out (`drop`, counted), or fail the job naming the lines (`error`). Of a pair, `left` cuts
    the beginning of the prompt, the same for both answers, before it cuts answers."""


class Resources(Request):
    accelerators: Annotated[int, Field(ge=1, le=1024)] = 1
    accelerator_type: Annotated[str, StringConstraints(min_length=1, max_length=64)] | None = None


class Limits(Request):
    """Caps; the job checkpoints and pauses before it would pass one."""

    max_cost: Usd | None = None
    max_tokens: Annotated[int, Field(ge=1)] | None = None
    max_seconds: Annotated[int, Field(ge=1)] | None = None


MetadataKey = Annotated[str, StringConstraints(min_length=1, max_length=64)]
MetadataValue = Annotated[str, StringConstraints(max_length=512)]
Metadata = Annotated[dict[MetadataKey, MetadataValue], Field(max_length=16)]
AddedToken = Annotated[str, StringConstraints(min_length=1, max_length=64)]


class JobSpec(Request):
    """The fields of every method."""

    model: Annotated[str, StringConstraints(min_length=1, max_length=256)] | None = None
    """Name or id of a base model in the catalogue. Exactly one of `model` and `from_checkpoint`."""
    from_checkpoint: CheckpointId | None = None
    """Start from this checkpoint; the optimizer starts fresh. `merge_checkpoint` says what becomes of its adapter. It
    is also the reference of DPO and RL."""
    merge_checkpoint: bool = False
    """False: the checkpoint's adapter goes on (its shape is taken over, `adapter` may be left out). True: it is merged
    into the weights and `adapter` starts new on top. A checkpoint of whole weights needs no merge: it is the base."""
    name: Name | None = None
    project: ProjectId | None = None
    seed: Annotated[int, Field(ge=0, lt=2**63)] = 0
    metadata: Metadata = {}
    adapter: Adapter = LoraAdapter()
    added_tokens: Annotated[tuple[AddedToken, ...], Field(max_length=256, strict=False)] = ()
    """Special tokens to add to the tokenizer. Their embeddings start as the mean of all and are trained, so `adapter`
    must be full or have `embed_tokens` (and, unless the model ties them, `lm_head`) in `modules_to_save`."""
    export_merged: bool = False
    """The final checkpoint of a LoRA job also holds the whole merged model, in `merged/`."""
    resources: Resources = Resources()
    priority: Literal["low", "normal", "high"] = "normal"
    limits: Limits = Limits()

    @model_validator(mode="after")
    def _one_start(self) -> Self:
        if (self.model is None) == (self.from_checkpoint is None):
            found = "neither" if self.model is None else "both"
            raise ValueError(f"expected exactly one of model and from_checkpoint, found {found}")
        return self
