"""A pool whose workers do what the test says: for the control plane's side of the backend contract."""

from __future__ import annotations

import asyncio
from collections import Counter
from dataclasses import dataclass, field

from finery_scheduler.backend import Launch, LaunchError, PoolUnreachableError, WorkerStatus
from finery_scheduler.core.types import Node


@dataclass
class ScriptedPool:
    """`Backend` in memory. A launched worker is `alive` until the test or `stop` says otherwise."""

    nodes_: tuple[Node, ...] = (Node("node-a", 4),)
    reachable: bool = True
    refuses: bool = False
    """`launch` raises LaunchError."""
    stops_to_fail: int = 0
    hangs: asyncio.Event | None = None
    """Nothing is answered until it is set."""
    launching: asyncio.Event | None = None
    """A launch lasts until it is set."""
    stopping: asyncio.Event | None = None
    """So does a stop."""
    bugs: int = 0
    """`nodes` raises something unforeseen, so many times."""
    launches: list[Launch] = field(default_factory=list)
    stops: list[str] = field(default_factory=list)
    workers_: dict[str, WorkerStatus] = field(default_factory=dict)

    async def start(self) -> None:
        if self.hangs is not None:
            await self.hangs.wait()
        self._answer()

    async def close(self) -> None:
        pass

    async def nodes(self) -> tuple[Node, ...]:
        self._answer()
        if self.bugs > 0:
            self.bugs -= 1
            raise RuntimeError("a bug in the driver")
        return self.nodes_

    async def launch(self, launch: Launch) -> None:
        self._answer()
        if self.launching is not None:
            await self.launching.wait()
        if self.refuses:
            raise LaunchError("no such entry point")
        if launch.attempt not in self.workers_:
            self.launches.append(launch)
            self.workers_[launch.attempt] = "alive"

    async def workers(self) -> dict[str, WorkerStatus]:
        self._answer()
        return dict(self.workers_)

    async def stop(self, attempt: str) -> None:
        self._answer()
        self.stops.append(attempt)
        if self.stopping is not None:
            await self.stopping.wait()
        if self.stops_to_fail > 0:
            self.stops_to_fail -= 1
            raise RuntimeError("the node does not answer")
        self.workers_.pop(attempt, None)

    def used(self) -> Counter[str]:
        """Slots held by workers that are there, by node."""
        held: Counter[str] = Counter()
        for launch in self.launches:
            if launch.attempt in self.workers_:
                held.update({place.node: place.slots for place in launch.placements})
        return held

    def _answer(self) -> None:
        if not self.reachable:
            raise PoolUnreachableError("the pool does not answer")
