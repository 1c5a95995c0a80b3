"""What a method is given, and how it says that it is over."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path

from obstore.store import ObjectStore

from finery.types.errors import ErrorDetail
from finery.types.jobs import Intent
from finery.types.methods import JobCreate
from finery.types.reasons import JobReason
from finery_gpu_workers.report import ControlPlane
from finery_protos.v1 import worker_pb2 as pb


@dataclass(frozen=True, kw_only=True)
class Task:
    """What every attempt has. A run of an environment has no model, so that this is all."""

    control: ControlPlane
    store: ObjectStore
    assignment: pb.Assignment
    folder: Path
    """Scratch space; gone when the attempt is over."""
    code_version: str
    score_models: Mapping[str, str | None] = field(default_factory=dict, repr=False)
    """Base URLs of score models that the operator allows, and their keys."""


@dataclass(frozen=True, kw_only=True)
class Work(Task):
    """Of an attempt of a job, or of a preview."""

    spec: JobCreate
    model_folder: Path
    """The base model in the transformers layout."""
    device: str


@dataclass(frozen=True)
class Ending:
    reason: JobReason
    error: ErrorDetail | None = None


def stopped_by_customer(intent: Intent) -> Ending:
    return Ending(JobReason.PAUSED_BY_CUSTOMER if intent is Intent.PAUSE else JobReason.CANCELLED_BY_CUSTOMER)
