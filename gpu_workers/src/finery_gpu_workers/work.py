"""What a method is given, and how it says that it is over."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

from obstore.store import ObjectStore

from finery.types.errors import ErrorDetail
from finery.types.jobs import Intent
from finery.types.methods import JobCreate
from finery.types.reasons import JobReason
from finery_gpu_workers.report import ControlPlane
from finery_protos.v1 import worker_pb2 as pb


@dataclass(frozen=True)
class Work:
    control: ControlPlane
    store: ObjectStore
    assignment: pb.Assignment
    spec: JobCreate
    model_folder: Path
    """The base model in the transformers layout."""
    device: str
    folder: Path
    """Scratch space; gone when the attempt is over."""
    code_version: str


@dataclass(frozen=True)
class Ending:
    reason: JobReason
    error: ErrorDetail | None = None


def stopped_by_customer(intent: Intent) -> Ending:
    return Ending(JobReason.PAUSED_BY_CUSTOMER if intent is Intent.PAUSE else JobReason.CANCELLED_BY_CUSTOMER)
