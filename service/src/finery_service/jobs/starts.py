"""What a job starts from: a model of the catalogue, or a checkpoint with all that lies under it (its base chain)."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, Literal

from pydantic import TypeAdapter
from sqlmodel.ext.asyncio.session import AsyncSession

from finery.types.methods import Adapter, JobCreate, LoraAdapter
from finery_service.checkpoints import store as checkpoints
from finery_service.checkpoints.tables import CheckpointRow
from finery_service.errors import ServiceError, refusal
from finery_service.jobs import queries
from finery_service.jobs.tables import JobRow
from finery_service.models import service as models
from finery_service.models.tables import ModelRow

_ADAPTER: TypeAdapter[Adapter] = TypeAdapter(Adapter)


@dataclass(frozen=True)
class Start:
    spec: JobCreate
    """With what it takes over from the checkpoint."""
    model: ModelRow
    base: list[dict[str, Any]]
    """[{"checkpoint", "kind": "full" | "merge"}]: what is put on top of the model, in order."""


async def find(session: AsyncSession, tenant_id: str, spec: JobCreate) -> Start:
    """Raises 400 naming the field that cannot be had. A checkpoint stays undeleted until the transaction ends."""
    if spec.from_checkpoint is None:
        assert spec.model is not None, "the schema wants exactly one of the two"
        model = await models.find(session, spec.model)
        if model is None:
            expected = "the name or id of a model in the catalogue"
            raise refusal("model_not_found", "model", expected, spec.model)
        if spec.merge_checkpoint:
            raise refusal("nothing_to_merge", "merge_checkpoint", "false, as there is no from_checkpoint", "true")
        return Start(spec, model, [])
    checkpoint = await checkpoints.get(session, tenant_id, spec.from_checkpoint, lock="keep")
    parent = await queries.get(session, tenant_id, checkpoint.job_id) if checkpoint else None
    if checkpoint is None or parent is None:
        expected = "the id of one of your checkpoints"
        raise refusal("checkpoint_not_found", "from_checkpoint", expected, spec.from_checkpoint)
    await _check_base(session, checkpoint, parent)
    model = await models.find(session, parent.model_id or "")
    assert model is not None, "what has a checkpoint was trained, and models are never deleted"
    return _on_top_of(checkpoint, parent, spec, model)


def _on_top_of(checkpoint: CheckpointRow, parent: JobRow, spec: JobCreate, model: ModelRow) -> Start:
    if checkpoint.kind == "full":
        if spec.merge_checkpoint:
            expected = f"false, as {checkpoint.id} is a whole model and has no adapter to merge"
            raise refusal("nothing_to_merge", "merge_checkpoint", expected, "true")
        return Start(spec, model, [_part(checkpoint, "full")])
    if spec.merge_checkpoint or spec.adapter.type == "full":
        return Start(spec, model, [*parent.base, _part(checkpoint, "merge")])
    taken = {
        "adapter": _ADAPTER.validate_python(parent.spec["adapter"]),
        "added_tokens": tuple(parent.spec.get("added_tokens", ())),
    }
    for name, value in taken.items():
        if name in spec.model_fields_set and getattr(spec, name) != value:
            expected = (
                f"that of the checkpoint, {_told(value)} (leave it out), or merge_checkpoint: true to start a new "
                "adapter on top"
            )
            raise refusal("checkpoint_goes_on", name, expected, _told(getattr(spec, name)))
    return Start(spec.model_copy(update=taken), model, parent.base)


async def _check_base(session: AsyncSession, checkpoint: CheckpointRow, parent: JobRow) -> None:
    for part in parent.base:
        if await checkpoints.get(session, parent.tenant_id, part["checkpoint"]) is None:
            message = (
                f"from_checkpoint: expected a checkpoint whose base is complete, found that {checkpoint.id} lies on "
                f"{part['checkpoint']}, which was deleted; start from another one."
            )
            raise ServiceError(400, "checkpoint_unusable", message, param="from_checkpoint")


def _part(checkpoint: CheckpointRow, kind: Literal["full", "merge"]) -> dict[str, Any]:
    return {"checkpoint": checkpoint.id, "kind": kind}


def _told(value: Any) -> str:
    if isinstance(value, LoraAdapter):
        targets = value.targets if isinstance(value.targets, str) else ", ".join(value.targets)
        also = f", whole {', '.join(value.modules_to_save)}" if value.modules_to_save else ""
        return f"lora of rank {value.rank}, alpha {value.alpha:g}, {targets}{also}"
    return f"{len(value)} tokens" if value else "none"
