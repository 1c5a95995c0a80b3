"""From what a function returned to a reward, or to why there is none."""

from __future__ import annotations

import math
from typing import Any

from finery.types.environments import RewardFailure
from finery_gpu_workers.environments.calls import Reply, showable
from finery_gpu_workers.environments.types import Grade

_PARTS = 64


class Failed(Exception):  # noqa: N818 - a state
    """There is no reward."""

    def __init__(self, code: str, message: str) -> None:
        super().__init__(message)
        self.code = code
        self.message = message


def failure(grader: str, code: str, message: str, **measured: Any) -> Grade:
    return Grade(failure=RewardFailure(code=code, message=message, grader=grader), **measured)


def grade_of(grader: str, reply: Reply) -> Grade:
    """True is 1 and False is 0. None is no reward; NaN, infinity and what is no number are invalid ones. A dict of
    numbers is summed; if one of them is none, the whole has no reward."""
    measured: dict[str, Any] = {"cpu_seconds": reply.cpu_seconds, "printed": reply.printed}
    if reply.timed_out:
        return failure(grader, "timeout", f"{reply.failed}; the grader's processes were killed", **measured)
    if reply.failed is not None:
        return failure(grader, "error", reply.failed, **measured)
    try:
        reward, parts = _reward(reply.value)
    except Failed as failed:
        return failure(grader, failed.code, failed.message, **measured)
    return Grade(reward=reward, parts=parts, **measured)


def _reward(value: Any) -> tuple[float, dict[str, float | None]]:
    if not isinstance(value, dict) or "dict" not in value:
        return _number(value, "the reward"), {}
    items = value["dict"]
    if not isinstance(items, list) or not all(isinstance(item, list) and len(item) == 2 for item in items):
        raise Failed("error", "the grader's answer cannot be read")
    if not items:
        raise Failed("no_reward", "expected a number, or a dict with at least one, found an empty dict")
    if len(items) > _PARTS:
        raise Failed("invalid_reward", f"expected at most {_PARTS} entries, found more")
    parts: dict[str, float | None] = {}
    for given, part in items:
        key = showable(given, 100) if isinstance(given, str) else "something else"
        if key in parts:
            raise Failed("invalid_reward", f"expected entries with names of their own, found [{key!r}] twice")
        parts[key] = _number(part, f"[{key!r}]")
    try:
        return math.fsum(part for part in parts.values() if part is not None), parts
    except OverflowError:
        raise Failed("invalid_reward", "expected a finite sum, found an overflow") from None


def _number(value: Any, where: str) -> float:
    if isinstance(value, dict) and "number" in value and type(value["number"]) in (int, float):
        try:
            number = float(value["number"])
        except OverflowError:
            number = math.inf
        if math.isfinite(number):
            return number
        raise Failed("invalid_reward", f"{where}: expected a finite number, found {number}")
    if isinstance(value, dict) and "none" in value:
        raise Failed("no_reward", f"{where}: expected a number, found None; None is not 0")
    found = value.get("other") if isinstance(value, dict) else None
    shown = showable(found, 200) if isinstance(found, str) else "something else"
    raise Failed("invalid_reward", f"{where}: expected a number, found {shown}")
