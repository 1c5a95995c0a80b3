"""What a loop has done, on its way to the control plane."""

from __future__ import annotations

import threading
from collections import deque
from collections.abc import Callable
from contextlib import suppress

from finery.types.jobs import Intent
from finery_gpu_workers.report import ControlPlane
from finery_protos.v1 import worker_pb2 as pb

_STEPS_PER_CALL = 64


class Outbox:
    """Sends steps and checkpoints in order from a thread of its own, so that the loop does not wait for them.

    What it holds is bounded by the grants: a step starts only when one acknowledged before it has granted it. An error
    is raised in the loop at its next call.
    """

    def __init__(self, control: ControlPlane) -> None:
        self._control = control
        self._changed = control.changed
        self._items: deque[pb.Step | Callable[[], None]] = deque()
        self._error: BaseException | None = None
        self._thread = threading.Thread(target=self._run, name="outbox", daemon=True)
        self._thread.start()

    def __enter__(self) -> Outbox:
        return self

    def __exit__(self, _kind: object, error: BaseException | None, _traceback: object) -> None:
        """When the loop fails, what it had handed over still goes out, so that a checkpoint on its way counts."""
        if isinstance(error, Exception) and error is not self._error:
            with suppress(Exception):
                self.drain()

    def commit(self, step: pb.Step) -> None:
        self._add(step)

    def then(self, action: Callable[[], None]) -> None:
        """Runs `action` once everything before it is acknowledged; what comes after waits for it.

        Returns at once unless an earlier action is still to be done: a slow store holds the loop up, not the memory.
        """
        with self._changed:
            self._changed.wait_for(lambda: self._error is not None or all(map(_is_step, self._items)))
        self._add(action)

    def wait_for_grant(self, step: int) -> Intent:
        intent = self._control.wait_for_grant(step, lambda: self._error is not None)
        self._raise()
        return intent

    def drain(self) -> None:
        """Returns once everything is acknowledged."""
        with self._changed:
            self._changed.wait_for(lambda: self._error is not None or not self._items)
        self._raise()

    def _add(self, item: pb.Step | Callable[[], None]) -> None:
        self._raise()
        with self._changed:
            self._items.append(item)
            self._changed.notify_all()

    def _raise(self) -> None:
        if self._error is not None:
            raise self._error

    def _run(self) -> None:
        try:
            while True:
                with self._changed:
                    self._changed.wait_for(lambda: bool(self._items))
                    batch = self._next()
                if isinstance(batch, list):
                    self._control.commit(batch)
                else:
                    batch()
                with self._changed:
                    for _ in range(len(batch) if isinstance(batch, list) else 1):
                        self._items.popleft()
                    self._changed.notify_all()
        except BaseException as error:
            with self._changed:
                self._error = error
                self._changed.notify_all()

    def _next(self) -> list[pb.Step] | Callable[[], None]:
        """All steps at the head of the queue, or the action there."""
        steps: list[pb.Step] = []
        for item in self._items:
            if not isinstance(item, pb.Step):
                return steps or item
            steps.append(item)
            if len(steps) == _STEPS_PER_CALL:
                break
        return steps


def _is_step(item: object) -> bool:
    return isinstance(item, pb.Step)
