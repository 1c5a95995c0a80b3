"""What `plan` reads and what it decides. Plain values: no clock, no database, no Ray."""

from __future__ import annotations

from dataclasses import dataclass
from datetime import datetime
from typing import Literal

from finery.types.reasons import JobReason

Priority = Literal["low", "normal", "high"]


@dataclass(frozen=True, slots=True)
class Node:
    """A machine of the pool."""

    id: str
    slots: int
    """Accelerators (worker slots) that it has, used ones included."""
    accelerator_type: str | None = None


@dataclass(frozen=True, slots=True)
class Placement:
    """Slots on one node that an attempt holds."""

    node: str
    slots: int


@dataclass(frozen=True, slots=True)
class Demand:
    """What a gang needs, all at once."""

    accelerators: int
    accelerator_type: str | None = None


@dataclass(frozen=True, slots=True)
class WaitingJob:
    """A job in state `queued`."""

    id: str
    version: int
    tenant: str
    project: str
    demand: Demand
    priority: Priority
    queued_at: datetime


@dataclass(frozen=True, slots=True)
class RunningJob:
    """A job that holds slots: its attempt is `starting` or `running`."""

    id: str
    version: int
    tenant: str
    project: str
    demand: Demand
    priority: Priority
    placements: tuple[Placement, ...]
    started_at: datetime


@dataclass(frozen=True, slots=True)
class Snapshot:
    """One consistent short read of the database, and the pool as last seen."""

    now: datetime
    nodes: tuple[Node, ...]
    pool_reachable: bool
    waiting: tuple[WaitingJob, ...]
    running: tuple[RunningJob, ...]


@dataclass(frozen=True, slots=True)
class Admission:
    job: str
    version: int
    placements: tuple[Placement, ...]


@dataclass(frozen=True, slots=True)
class Preemption:
    job: str
    version: int
    for_job: str


@dataclass(frozen=True, slots=True)
class Resize:
    """Shrink or grow a running elastic job."""

    job: str
    version: int
    accelerators: int


@dataclass(frozen=True, slots=True)
class Wait:
    """Why a job waits, and its place in the queue, from 1."""

    job: str
    reason: JobReason
    position: int


@dataclass(frozen=True, slots=True)
class Plan:
    """Every waiting job is in exactly one of `admissions` and `waits`."""

    admissions: tuple[Admission, ...]
    waits: tuple[Wait, ...]
    preemptions: tuple[Preemption, ...] = ()
    resizes: tuple[Resize, ...] = ()
