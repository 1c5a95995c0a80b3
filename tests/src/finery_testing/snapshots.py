"""Snapshots for scheduler tests: short constructors, and hypothesis strategies over small and strange pools."""

from __future__ import annotations

from collections.abc import Sequence
from datetime import UTC, datetime, timedelta

from hypothesis import strategies as st

from finery_scheduler.core.types import Demand, Node, Placement, Plan, Priority, RunningJob, Snapshot, WaitingJob

NOW = datetime(2026, 1, 1, tzinfo=UTC)


def waits(
    id: str,  # noqa: A002
    accelerators: int = 1,
    type: str | None = None,  # noqa: A002
    *,
    priority: Priority = "normal",
    at: int = 0,
) -> WaitingJob:
    """A waiting job, queued `at` seconds after `NOW`."""
    queued_at = NOW + timedelta(seconds=at)
    return WaitingJob(id, 1, "ten_a", "proj_a", Demand(accelerators, type), priority, queued_at)


def runs(id: str, *placements: tuple[str, int]) -> RunningJob:  # noqa: A002
    held = tuple(Placement(node, slots) for node, slots in placements)
    demand = Demand(sum(placement.slots for placement in held))
    return RunningJob(id, 1, "ten_a", "proj_a", demand, "normal", held, NOW)


def snapshot(
    nodes: Sequence[Node], waiting: Sequence[WaitingJob], running: Sequence[RunningJob] = (), *, reachable: bool = True
) -> Snapshot:
    return Snapshot(NOW, tuple(nodes), reachable, tuple(waiting), tuple(running))


def started(job: WaitingJob, plan: Plan) -> RunningJob | None:
    """The running job that an admission makes of a waiting one."""
    for admission in plan.admissions:
        if admission.job == job.id:
            return RunningJob(
                job.id, job.version, job.tenant, job.project, job.demand, job.priority, admission.placements, NOW
            )
    return None


TYPES = st.sampled_from([None, "H", "L"])


@st.composite
def snapshots(draw: st.DrawFn, *, reachable: bool | None = None) -> Snapshot:
    """Any pool of up to five nodes; running jobs may hold unknown nodes or more than a node has."""
    nodes = [Node(f"n{n}", draw(st.integers(0, 8)), draw(TYPES)) for n in range(draw(st.integers(0, 5)))]
    holding = st.tuples(st.sampled_from([f"n{n}" for n in range(7)]), st.integers(1, 6))
    running = [runs(f"r{n}", *draw(st.lists(holding, max_size=3))) for n in range(draw(st.integers(0, 4)))]
    priorities: st.SearchStrategy[Priority] = st.sampled_from(("low", "normal", "high"))
    waiting = [
        waits(f"w{n}", draw(st.integers(1, 12)), draw(TYPES), priority=draw(priorities), at=draw(st.integers(0, 3)))
        for n in range(draw(st.integers(0, 10)))
    ]
    return snapshot(nodes, waiting, running, reachable=draw(st.booleans()) if reachable is None else reachable)
