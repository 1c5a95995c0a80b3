"""Checkpoints: immutable, hashed sets of files."""

from __future__ import annotations

from typing import Any, Literal

from finery.types.base import Resource, Time


class CheckpointFile(Resource):
    path: str
    """Relative, with forward slashes."""
    bytes: int
    sha256: str


class Checkpoint(Resource):
    """It exists only if its row does: written under the attempt's fence after all files were uploaded."""

    object: Literal["checkpoint"] = "checkpoint"
    id: str
    job: str
    project: str
    step: int
    final: bool
    model: str
    files: tuple[CheckpointFile, ...]
    bytes: int
    manifest: dict[str, Any] = {}
    """How it was made: spec, data digest, template digest, code version, seeds, metrics."""
    created_at: Time
