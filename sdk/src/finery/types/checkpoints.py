"""Checkpoints: immutable, hashed sets of files."""

from __future__ import annotations

from os import PathLike
from typing import Any, Literal

from finery.types.base import Linked, Resource, Time


class CheckpointFile(Resource):
    path: str
    """Relative, with forward slashes."""
    bytes: int
    sha256: str


class Checkpoint(Linked):
    """It exists only if its row does: written under the attempt's fence after all files were uploaded."""

    object: Literal["checkpoint"] = "checkpoint"
    id: str
    job: str
    project: str
    step: int
    final: bool
    kind: Literal["adapter", "full"] | str = "adapter"
    """A LoRA adapter in PEFT's layout, or a whole model in transformers' layout."""
    validation_loss: float | None = None
    """Mean over the validation file's trained tokens at this step; None without one (or when it was not finite)."""
    validation_reward: float | None = None
    """RL: mean greedy reward on the held-out prompts at this step."""
    best: bool = False
    """It has the lowest validation loss (RL: the highest validation reward) of its job's checkpoints; the earliest of
    equals."""
    model: str
    files: tuple[CheckpointFile, ...]
    bytes: int
    manifest: dict[str, Any] = {}
    """How it was made: spec, data digest, template digest, code version, seeds, metrics."""
    created_at: Time

    def download(self, folder: str | PathLike[str], **options: Any) -> Any:
        """`client.checkpoints.download` of this checkpoint into `folder`."""
        return self._client().checkpoints.download(self, folder, **options)

    def delete(self) -> Any:
        return self._client().checkpoints.delete(self)
