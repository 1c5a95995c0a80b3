"""A pool on this machine without Ray: every worker is a real child process. For tests only."""

from __future__ import annotations

import asyncio
import json
import os
import subprocess
import sys
from collections.abc import Sequence

from finery_scheduler.backend import Launch, LaunchError, PoolUnreachableError, WorkerStatus
from finery_scheduler.backends.processes import StillRunningError, kill_attempt
from finery_scheduler.backends.worker import MARK
from finery_scheduler.core.types import Node, Placement


class InlineBackend:
    """Workers are children of this object's process, so another object cannot adopt them."""

    def __init__(self, nodes: Sequence[Node] = (Node("inline", 4),)) -> None:
        self._nodes = tuple(sorted(nodes, key=lambda node: node.id))
        self._workers: dict[str, tuple[subprocess.Popen[bytes], tuple[Placement, ...]]] = {}
        self._one_at_a_time = asyncio.Lock()

    async def start(self) -> None:
        return

    async def close(self) -> None:
        return

    async def nodes(self) -> tuple[Node, ...]:
        return self._nodes

    async def launch(self, launch: Launch) -> None:
        async with self._one_at_a_time:
            if launch.attempt in self._workers:
                return
            self._check_fits(launch.placements)
            process = subprocess.Popen(  # noqa: ASYNC220 - forks in a millisecond; the reply is awaited in a thread
                [sys.executable, "-m", "finery_scheduler.backends.worker", launch.attempt],
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                env={**os.environ, MARK: launch.attempt},
                start_new_session=True,
            )
            self._workers[launch.attempt] = (process, launch.placements)
            error = await asyncio.to_thread(_hand_over, process, launch)
        if error is not None:
            await self.stop(launch.attempt)
            raise LaunchError(error)

    async def workers(self) -> dict[str, WorkerStatus]:
        return {
            attempt: "alive" if process.poll() is None else "dead" for attempt, (process, _) in self._workers.items()
        }

    async def stop(self, attempt: str) -> None:
        if attempt not in self._workers:
            return
        process, _ = self._workers[attempt]
        try:
            await asyncio.to_thread(kill_attempt, attempt)
        except StillRunningError as error:
            raise PoolUnreachableError(str(error)) from error
        await asyncio.to_thread(process.wait)
        self._workers.pop(attempt, None)

    def _check_fits(self, placements: tuple[Placement, ...]) -> None:
        free = {node.id: node.slots for node in self._nodes}
        for _, held in self._workers.values():
            for placement in held:
                free[placement.node] -= placement.slots
        for placement in placements:
            if placement.slots > free.get(placement.node, 0):
                there = f"has {free[placement.node]} free" if placement.node in free else "is not in the pool"
                raise LaunchError(f"{placement.slots} slots on node {placement.node}: the node {there}")
            free[placement.node] -= placement.slots


def _hand_over(process: subprocess.Popen[bytes], launch: Launch) -> str | None:
    """Give the child its work and hear whether it can do it. A child that died on the way is a dead worker."""
    assert process.stdin is not None
    assert process.stdout is not None
    request = {"entrypoint": launch.entrypoint, "environment": launch.environment}
    try:
        with process.stdin:
            process.stdin.write(json.dumps(request).encode() + b"\n")
    except BrokenPipeError:
        return None
    with process.stdout:
        reply = process.stdout.readline()
    return str(error) if reply and (error := json.loads(reply)) is not None else None
