"""The order in which waiting jobs are considered."""

from __future__ import annotations

from collections.abc import Iterable

from finery_scheduler.core.types import WaitingJob

_RANK = {"high": 0, "normal": 1, "low": 2}


def in_order(waiting: Iterable[WaitingJob]) -> list[WaitingJob]:
    """Highest priority first, then oldest; equal times fall back to the id, so that the order is total."""
    return sorted(waiting, key=lambda job: (_RANK[job.priority], job.queued_at, job.id))
