"""Worked cases of the first policy; ids are those of ../shared/cases/f-scheduling.md."""

from __future__ import annotations

from finery.types.reasons import JobReason
from finery_scheduler.core.plan import plan
from finery_scheduler.core.types import Node, Placement, RunningJob, WaitingJob
from finery_testing.snapshots import runs, snapshot, started, waits

TWO_BY_FOUR = (Node("a", 4), Node("b", 4))


def admitted(*args: object, **more: object) -> dict[str, tuple[Placement, ...]]:
    return {a.job: a.placements for a in plan(snapshot(*args, **more)).admissions}  # type: ignore[arg-type]


def reasons(*args: object, **more: object) -> list[tuple[str, JobReason, int]]:
    waiting = plan(snapshot(*args, **more)).waits  # type: ignore[arg-type]
    return [(wait.job, wait.reason, wait.position) for wait in waiting]


def test_two_large_gangs_never_share_the_pool_and_run_one_after_the_other_f01() -> None:
    first, second = waits("A", 6), waits("B", 6, at=1)
    assert admitted(TWO_BY_FOUR, [second, first]) == {"A": (Placement("a", 4), Placement("b", 2))}
    assert reasons(TWO_BY_FOUR, [second, first]) == [("B", JobReason.WAITING_FOR_CAPACITY, 1)]
    assert admitted(TWO_BY_FOUR, [second], [runs("A", ("a", 4), ("b", 2))]) == {}
    assert sum(placement.slots for placement in admitted(TWO_BY_FOUR, [second])["B"]) == 6


def test_an_independent_type_is_not_blocked_by_a_large_job_f08() -> None:
    pool = (Node("h", 4, "H"), Node("l", 4, "L"))
    queue = [waits("big", 4, "H"), waits("small", 1, "H", at=1), waits("other", 1, "L", at=2)]
    running = [runs("r", ("h", 1))]
    assert admitted(pool, queue, running) == {"other": (Placement("l", 1),)}
    assert reasons(pool, queue, running) == [
        ("big", JobReason.WAITING_FOR_CAPACITY, 1),
        ("small", JobReason.WAITING_BEHIND, 2),
    ]


def test_small_jobs_do_not_starve_a_large_one_that_came_first_f08() -> None:
    """A slot frees up every minute and a small job arrives every minute: the large job starts once all is free."""
    pool = (Node("h", 4, "H"),)
    running: list[RunningJob] = [runs(f"r{n}", ("h", 1)) for n in range(4)]
    waiting: list[WaitingJob] = [waits("big", 4, "H")]
    for minute in range(1, 5):
        running.pop()
        waiting.append(waits(f"s{minute}", 1, "H", at=minute))
        starts = admitted(pool, waiting, running)
        assert starts == ({"big": (Placement("h", 4),)} if minute == 4 else {})


def test_a_job_of_any_type_waits_for_no_type_that_an_earlier_one_claims() -> None:
    pool = (Node("h", 4, "H"), Node("l", 4, "L"))
    queue = [waits("big", 4, "H"), waits("any", 2, None, at=1), waits("any too", 3, None, at=2)]
    running = [runs("r", ("h", 1))]
    assert admitted(pool, queue, running) == {"any": (Placement("l", 2),)}
    assert reasons(pool, queue, running)[1] == ("any too", JobReason.WAITING_FOR_CAPACITY, 2)


def test_a_gang_never_mixes_accelerator_types() -> None:
    pool = (Node("h", 4, "H"), Node("l", 4, "L"))
    assert reasons(pool, [waits("j", 6)]) == [("j", JobReason.EXCEEDS_POOL, 1)]


def test_a_job_larger_than_the_pool_says_so_and_blocks_nobody() -> None:
    queue = [waits("huge", 9), waits("small", 1, at=1)]
    assert admitted(TWO_BY_FOUR, queue) == {"small": (Placement("a", 1),)}
    assert reasons(TWO_BY_FOUR, queue) == [("huge", JobReason.EXCEEDS_POOL, 1)]
    assert reasons((), queue) == [("huge", JobReason.EXCEEDS_POOL, 1), ("small", JobReason.EXCEEDS_POOL, 2)]
    assert reasons(TWO_BY_FOUR, [waits("j", 1, "T9")]) == [("j", JobReason.EXCEEDS_POOL, 1)]


def test_higher_priority_goes_first_then_age_then_id() -> None:
    queue = [
        waits("b", priority="normal"),
        waits("a", priority="normal"),
        waits("old", priority="low", at=-9),
        waits("new", priority="high", at=9),
    ]
    assert list(admitted([Node("n", 2)], queue)) == ["new", "a"]
    assert [job for job, _, _ in reasons([Node("n", 2)], queue)] == ["b", "old"]


def test_the_fullest_node_that_fits_is_taken_so_that_large_holes_stay() -> None:
    pool = (Node("a", 8), Node("b", 8), Node("c", 8))
    running = [runs("x", ("b", 5)), runs("y", ("c", 2))]
    assert admitted(pool, [waits("j", 3)], running) == {"j": (Placement("b", 3),)}
    assert admitted(pool, [waits("j", 5)], running) == {"j": (Placement("c", 5),)}


def test_a_gang_that_must_spread_uses_the_fewest_nodes() -> None:
    pool = (Node("a", 2), Node("b", 5), Node("c", 4), Node("d", 1))
    assert admitted(pool, [waits("j", 6)]) == {"j": (Placement("b", 5), Placement("d", 1))}
    assert admitted(pool, [waits("j", 9)]) == {"j": (Placement("b", 5), Placement("c", 4))}


def test_placements_on_lost_nodes_and_on_shrunk_nodes_free_nothing() -> None:
    running = [runs("x", ("gone", 4)), runs("y", ("a", 6))]
    assert admitted(TWO_BY_FOUR, [waits("j", 5)], running) == {}
    assert admitted(TWO_BY_FOUR, [waits("j", 4)], running) == {"j": (Placement("b", 4),)}


def test_an_unreachable_pool_starts_nothing_and_says_so() -> None:
    queue = [waits("j1"), waits("j2", at=1)]
    assert admitted(TWO_BY_FOUR, queue, reachable=False) == {}
    assert reasons(TWO_BY_FOUR, queue, reachable=False) == [
        ("j1", JobReason.POOL_UNREACHABLE, 1),
        ("j2", JobReason.POOL_UNREACHABLE, 2),
    ]


def test_a_thousand_tiny_jobs_on_a_hundred_slots_all_end_f15() -> None:
    """Every job runs 1 to 3 periods; none waits while a slot is free; each waiting one has a reason and a position."""
    pool = [Node(f"n{n:02}", 4) for n in range(25)]
    waiting = [waits(f"job{n:04}", at=n) for n in range(1000)]
    running: dict[str, tuple[int, RunningJob]] = {}
    ended = 0
    for period in range(40):
        for name in [name for name, (ends, _) in running.items() if ends <= period]:
            del running[name]
            ended += 1
        decided = plan(snapshot(pool, waiting, [job for _, job in running.values()]))
        left = []
        for job in waiting:
            if begun := started(job, decided):
                running[job.id] = (period + 1 + int(job.id[3:]) % 3, begun)
            else:
                left.append(job)
        assert len(running) == 100 or not left
        assert [wait.position for wait in decided.waits] == list(range(1, len(left) + 1))
        waiting = left
        if ended == 1000:
            break
    assert ended == 1000
