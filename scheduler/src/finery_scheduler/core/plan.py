"""The scheduling decision: one pure function from what is to what to do."""

from __future__ import annotations

from finery.types.reasons import JobReason
from finery_scheduler.core.ordering import in_order
from finery_scheduler.core.packing import best_fit, groups
from finery_scheduler.core.types import Admission, Plan, Snapshot, Wait


def plan(snapshot: Snapshot) -> Plan:
    """Admissions in queue order, and a reason and a position for every job that waits on.

    Strict FIFO by (priority, time, id) within what jobs compete for: a job that does not fit claims every group of
    nodes that it could run on, and no later job starts there. Groups that nobody claimed stay open (F08); a job
    larger than any group claims none, since waiting would never help it.
    """
    queue = in_order(snapshot.waiting)
    if not snapshot.pool_reachable:
        return Plan((), tuple(Wait(job.id, JobReason.POOL_UNREACHABLE, n) for n, job in enumerate(queue, start=1)))
    pool = groups(snapshot.nodes, snapshot.running)
    claimed: set[str | None] = set()
    admissions: list[Admission] = []
    waits: list[Wait] = []
    for job in queue:
        possible = [group for group in pool if group.could_ever_run(job.demand)]
        open_groups = [group for group in possible if group.accelerator_type not in claimed]
        if found := best_fit(open_groups, job.demand.accelerators):
            group, placements = found
            group.take(placements)
            admissions.append(Admission(job.id, job.version, placements))
            continue
        if not possible:
            reason = JobReason.EXCEEDS_POOL
        elif open_groups:
            reason = JobReason.WAITING_FOR_CAPACITY
        else:
            reason = JobReason.WAITING_BEHIND
        claimed.update(group.accelerator_type for group in possible)
        waits.append(Wait(job.id, reason, len(waits) + 1))
    return Plan(tuple(admissions), tuple(waits))
