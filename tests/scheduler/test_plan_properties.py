"""What holds for every snapshot."""

from __future__ import annotations

from dataclasses import replace
from random import Random

from hypothesis import given, settings
from hypothesis import strategies as st

from finery.types.reasons import JobReason
from finery_scheduler.core.plan import plan
from finery_scheduler.core.types import Node, Snapshot, WaitingJob
from finery_testing.snapshots import snapshots, started

RANK = {"high": 0, "normal": 1, "low": 2}


def order(job: WaitingJob) -> tuple[int, object, str]:
    return RANK[job.priority], job.queued_at, job.id


def free(seen: Snapshot) -> dict[str, int]:
    """Recounted slot by slot, apart from the code under test."""
    left = {node.id: node.slots for node in seen.nodes}
    for job in seen.running:
        for placement in job.placements:
            if placement.node in left:
                left[placement.node] -= placement.slots
    return {node: max(0, slots) for node, slots in left.items()}


def could_run(job: WaitingJob, nodes: tuple[Node, ...]) -> set[str | None]:
    """Accelerator types whose nodes together are large enough for the gang."""
    capacity: dict[str | None, int] = {}
    for node in nodes:
        capacity[node.accelerator_type] = capacity.get(node.accelerator_type, 0) + node.slots
    wanted = job.demand
    return {
        name
        for name, slots in capacity.items()
        if slots >= wanted.accelerators and wanted.accelerator_type in (None, name)
    }


@given(snapshots())
def test_no_node_is_oversubscribed(seen: Snapshot) -> None:
    left = free(seen)
    for admission in plan(seen).admissions:
        for placement in admission.placements:
            assert placement.slots > 0
            left[placement.node] -= placement.slots
    assert all(slots >= 0 for slots in left.values())


@given(snapshots())
def test_every_waiting_job_is_admitted_or_told_why_it_waits_with_a_position(seen: Snapshot) -> None:
    decided = plan(seen)
    named = [admission.job for admission in decided.admissions] + [wait.job for wait in decided.waits]
    assert sorted(named) == sorted(job.id for job in seen.waiting)
    by_id = {job.id: job for job in seen.waiting}
    assert [wait.position for wait in decided.waits] == list(range(1, len(decided.waits) + 1))
    assert [wait.job for wait in decided.waits] == [
        job.id for job in sorted((by_id[wait.job] for wait in decided.waits), key=order)
    ]


@given(snapshots())
def test_a_gang_gets_all_its_slots_on_distinct_nodes_of_one_right_type(seen: Snapshot) -> None:
    jobs, nodes = {job.id: job for job in seen.waiting}, {node.id: node for node in seen.nodes}
    for admission in plan(seen).admissions:
        job = jobs[admission.job]
        used = [placement.node for placement in admission.placements]
        types = {nodes[node].accelerator_type for node in used}
        assert sum(placement.slots for placement in admission.placements) == job.demand.accelerators
        assert len(used) == len(set(used))
        assert len(types) == 1
        assert job.demand.accelerator_type in (None, *types)
        assert admission.version == job.version


@given(snapshots())
def test_a_job_starts_only_where_no_earlier_waiting_job_could_run(seen: Snapshot) -> None:
    decided, nodes = plan(seen), {node.id: node for node in seen.nodes}
    waiting = {wait.job for wait in decided.waits}
    placed = {a.job: nodes[a.placements[0].node].accelerator_type for a in decided.admissions}
    queue = sorted(seen.waiting, key=order)
    for n, job in enumerate(queue):
        if job.id in placed:
            for earlier in queue[:n]:
                assert earlier.id not in waiting or placed[job.id] not in could_run(earlier, seen.nodes)


@given(snapshots(reachable=True))
def test_no_job_waits_without_need(seen: Snapshot) -> None:
    """Work conserving within FIFO: a waiting job lacks free slots or stands behind one that competes with it."""
    decided, left = plan(seen), free(seen)
    for admission in decided.admissions:
        for placement in admission.placements:
            left[placement.node] -= placement.slots
    reasons = {wait.job: wait.reason for wait in decided.waits}
    claimed: set[str | None] = set()
    for job in sorted(seen.waiting, key=order):
        if job.id not in reasons:
            continue
        possible = could_run(job, seen.nodes)
        open_types = possible - claimed
        for name in open_types:
            here = sum(left[node.id] for node in seen.nodes if node.accelerator_type == name)
            assert here < job.demand.accelerators
        expected = (
            JobReason.WAITING_FOR_CAPACITY if open_types else JobReason.WAITING_BEHIND if possible else "exceeds_pool"
        )
        assert reasons[job.id] == expected
        claimed |= possible


@given(snapshots(), st.randoms(use_true_random=False))
def test_the_order_of_rows_in_the_snapshot_decides_nothing(seen: Snapshot, random: Random) -> None:
    nodes, waiting, running = list(seen.nodes), list(seen.waiting), list(seen.running)
    for rows in (nodes, waiting, running):
        random.shuffle(rows)
    other = replace(seen, nodes=tuple(nodes), waiting=tuple(waiting), running=tuple(running))
    assert plan(other) == plan(seen)


@given(snapshots(reachable=False))
def test_nothing_starts_while_the_pool_is_unreachable(seen: Snapshot) -> None:
    decided = plan(seen)
    assert decided.admissions == ()
    assert {wait.reason for wait in decided.waits} <= {JobReason.POOL_UNREACHABLE}


@settings(max_examples=50)
@given(snapshots(reachable=True))
def test_every_job_that_could_ever_run_starts_in_bounded_rounds(seen: Snapshot) -> None:
    """No starvation: when all running jobs end each round, every round starts at least one more."""
    waiting = seen.waiting
    for _ in range(len(seen.waiting) + 1):
        decided = plan(replace(seen, waiting=waiting, running=()))
        waiting = tuple(job for job in waiting if started(job, decided) is None)
    assert not [job.id for job in waiting if could_run(job, seen.nodes)]
