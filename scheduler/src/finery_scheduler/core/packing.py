"""Where a gang fits: free slots by accelerator type, all slots at once or none."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass

from finery_scheduler.core.types import Demand, Node, Placement, RunningJob


@dataclass(slots=True)
class Group:
    """The nodes of one accelerator type. A gang never mixes types: its slowest member would set the pace."""

    accelerator_type: str | None
    capacity: int
    """Slots of all nodes, used ones included."""
    free: dict[str, int]
    """Free slots by node id; never negative."""

    def could_ever_run(self, demand: Demand) -> bool:
        """Whether it would fit if nothing else ran."""
        right_type = demand.accelerator_type is None or demand.accelerator_type == self.accelerator_type
        return right_type and demand.accelerators <= self.capacity

    def take(self, placements: tuple[Placement, ...]) -> None:
        for placement in placements:
            self.free[placement.node] -= placement.slots


def groups(nodes: Iterable[Node], running: Iterable[RunningJob]) -> list[Group]:
    """The pool by accelerator type, in a stable order, without what running jobs hold.

    A placement on a node that is gone holds nothing; a node that lost slots under its jobs has none free.
    """
    held: dict[str, int] = {}
    for job in running:
        for placement in job.placements:
            held[placement.node] = held.get(placement.node, 0) + placement.slots
    found: dict[str | None, Group] = {}
    for node in sorted(nodes, key=lambda node: (node.accelerator_type or "", node.id)):
        group = found.setdefault(node.accelerator_type, Group(node.accelerator_type, 0, {}))
        group.capacity += node.slots
        group.free[node.id] = max(0, node.slots - held.get(node.id, 0))
    return list(found.values())


def fit(group: Group, accelerators: int) -> tuple[Placement, ...] | None:
    """Placements on the fewest nodes, leaving the largest holes whole; None if the free slots do not suffice."""
    if sum(group.free.values()) < accelerators:
        return None
    fullest_last = sorted((node for node in group.free.items() if node[1] > 0), key=lambda node: (-node[1], node[0]))
    placements: list[Placement] = []
    missing = accelerators
    while missing > 0:
        enough = [node for node in fullest_last if node[1] >= missing]
        node, free = min(enough, key=lambda node: (node[1], node[0])) if enough else fullest_last[0]
        fullest_last.remove((node, free))
        placements.append(Placement(node, min(free, missing)))
        missing -= placements[-1].slots
    return tuple(placements)


def best_fit(candidates: Iterable[Group], accelerators: int) -> tuple[Group, tuple[Placement, ...]] | None:
    """The group where the gang spans the fewest nodes; then the one with the fewest free slots."""
    fits = [(group, placements) for group in candidates if (placements := fit(group, accelerators)) is not None]
    return min(fits, key=lambda found: (len(found[1]), sum(found[0].free.values())), default=None)
