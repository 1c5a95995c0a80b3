"""The one protocol between the control plane and a pool of accelerators."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Literal, Protocol

from finery_scheduler.core.types import Node, Placement

WorkerStatus = Literal["alive", "dead", "unreachable"]
"""`dead` only when the pool knows it for sure; "cannot reach" is not "dead"."""


@dataclass(frozen=True, slots=True)
class Launch:
    """One attempt to start. The pool starts `entrypoint(environment)` in a process of its own."""

    attempt: str
    entrypoint: str
    """Dotted name `package.module:callable`; it takes `environment` and returns when the attempt is over."""
    environment: dict[str, str] = field(repr=False)
    """What the worker needs to report: address, attempt id, fence, token, store, cache. Secret: not in its repr."""
    placements: tuple[Placement, ...]
    """Slots held on each node; empty for a CPU-only attempt (preparation)."""


class PoolUnreachableError(Exception):
    """The pool does not answer; nothing is known about its workers."""


class LaunchError(Exception):
    """The pool answered and cannot start this attempt."""


class Backend(Protocol):
    """Every call is idempotent by attempt id and raises `PoolUnreachableError` when the pool does not answer."""

    async def start(self) -> None:
        """Connect (or start the driver). Repeatable."""

    async def close(self) -> None:
        """Let go without disturbing any worker."""

    async def nodes(self) -> tuple[Node, ...]:
        """The pool's machines, in a stable order."""

    async def launch(self, launch: Launch) -> None:
        """Start a worker unless one of that attempt exists (then it is adopted). Raises `LaunchError`."""

    async def workers(self) -> dict[str, WorkerStatus]:
        """All attempts known to the pool, those of earlier control planes included."""

    async def stop(self, attempt: str) -> None:
        """Kill the attempt's processes and free its slots; no error if there is none."""
