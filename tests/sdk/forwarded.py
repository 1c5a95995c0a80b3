"""A job whose history is forwarded, for the tests of trackers."""

from __future__ import annotations

import math
from contextlib import AbstractContextManager

import pytest

from .support import Handler, HttpServer, Seen, event_json, job_json, serving, sse

SPEC = {
    "name": "bot",
    "validation_file": "file_2",
    "hyperparameters": {"learning_rate": 0.0002, "schedule": "cosine", "max_steps": None},
    "adapter": {"type": "lora", "rank": 16, "targets": ["q_proj"]},
}
EVENTS = [
    event_json(1, "state", to="running"),
    event_json(2, "eval", step=0, loss=3.94, tokens=50),
    event_json(3, step=1, total_steps=3, loss=3.5, learning_rate=1e-4, cost="0.000012", memory_bytes=None),
    event_json(4, step=2, total_steps=3, loss=None, learning_rate=2e-4, cost="0.000024", non_finite={"loss": "NaN"}),
    event_json(5, "attempt", phase="started", number=2, resumed_from_step=1),
    event_json(6, step=2, total_steps=3, loss=3.25, learning_rate=2e-4, cost="0.000024"),
    event_json(7, "checkpoint", checkpoint="ckpt_1", step=3, validation_loss=3.0),
    event_json(8, "eval", step=3, loss=3.0, tokens=50),
    event_json(9, "state", to="succeeded"),
]
LOSSES = [(1, 3.5), (2, math.nan), (2, 3.25)]
HELD_OUT = [(0, 3.94), (3, 3.0)]


def running(state: str = "succeeded") -> AbstractContextManager[HttpServer]:
    """A server with one job that ends in `state`; its stream is cut once, in the middle of an event."""

    def reply(handler: Handler, seen: Seen) -> None:
        if "/events" not in seen.path:
            return handler.json(
                200, job_json(**SPEC, state=state, reason="completed", finished_at=EVENTS[0]["created_at"])
            )
        after = int(seen.headers["last-event-id"])
        handler.stream()
        rest = sse(*EVENTS[after:], done=True)
        handler.wfile.write(rest[:700] if after == 0 else rest)
        return None

    return serving(reply)


def same(found: list[tuple[int, float]], expected: list[tuple[int, float]]) -> bool:
    """Equal, NaN where NaN is expected, to the float32 that TensorBoard keeps."""
    return [step for step, _ in found] == [step for step, _ in expected] and [v for _, v in found] == pytest.approx(
        [v for _, v in expected], rel=1e-6, nan_ok=True
    )
