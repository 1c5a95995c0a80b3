"""The batch plan, against its own definition restated slowly."""

from __future__ import annotations

from itertools import chain
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from finery.types.methods import SftHyperparameters
from finery_gpu_workers.data.packing import Plan, micro_batches

lengths = st.lists(st.integers(1, 40), min_size=1, max_size=30)


def plan(rows: list[int], seed: int = 0, **hyper: Any) -> Plan:
    return Plan(np.array(rows, dtype=np.int64), SftHyperparameters(**hyper), seed)


def updates(p: Plan) -> list[list[int]]:
    return [p.update(step).rows.tolist() for step in range(1, p.total_steps + 1)]


def test_a23_the_end_of_an_epoch_ends_an_update() -> None:
    p = plan([16] * 5, batch_tokens=32, epochs=2)
    assert p.total_steps == 6
    assert [len(rows) for rows in updates(p)] == [2, 2, 1, 2, 2, 1]
    assert sorted(chain(*updates(p))) == sorted([*range(5)] * 2)
    assert p.total(np.array([10] * 5)) == 100


@given(lengths, st.integers(16, 60), st.integers(1, 3), st.integers(0, 2**63 - 1))
def test_every_epoch_holds_every_row_once_in_greedy_updates(
    rows: list[int], batch_tokens: int, epochs: int, seed: int
) -> None:
    p = plan(rows, seed, batch_tokens=batch_tokens, epochs=epochs)
    seen: dict[int, list[int]] = {}
    for step in range(1, p.total_steps + 1):
        update = p.update(step)
        before = seen.setdefault(update.epoch, [])
        assert update.position == len(before)
        tokens = sum(rows[n] for n in update.rows)
        assert tokens <= batch_tokens or len(update.rows) == 1
        if before:  # greedy: the first row here did not fit there
            last = p.update(step - 1)
            assert sum(rows[n] for n in last.rows) + rows[update.rows[0]] > batch_tokens
        before.extend(update.rows.tolist())
    assert [sorted(order) for order in seen.values()] == [list(range(len(rows)))] * epochs


@given(lengths, st.integers(1, 50), st.integers(0, 5))
def test_max_steps_repeats_the_data_as_often_as_needed(rows: list[int], max_steps: int, seed: int) -> None:
    p = plan(rows, seed, batch_tokens=32, max_steps=max_steps, epochs=1)
    assert p.total_steps == max_steps
    counts = np.array([3 * n + 1 for n in rows])
    assert p.total(counts) == sum(int(counts[row]) for update in updates(p) for row in update)
    with pytest.raises(ValueError, match=f"expected 1 to {max_steps}"):
        p.update(max_steps + 1)


def test_d01_epochs_differ_and_steps_can_be_asked_for_in_any_order() -> None:
    p = plan([2] * 10, 7, batch_tokens=16, epochs=3)
    forward = updates(p)
    assert updates(plan([2] * 10, 7, batch_tokens=16, epochs=3))[::-1] == [
        p.update(step).rows.tolist() for step in range(p.total_steps, 0, -1)
    ]
    orders = [[*forward[2 * epoch], *forward[2 * epoch + 1]] for epoch in range(3)]
    assert [sorted(order) for order in orders] == [list(range(10))] * 3
    assert len({tuple(order) for order in orders}) == 3
    assert forward != updates(plan([2] * 10, 8, batch_tokens=16, epochs=3))


def test_the_order_of_a_seed_never_changes() -> None:
    """Jobs that are resumed by a newer numpy must see the same rows: these numbers are written down."""
    assert updates(plan([16] * 8, 1234, batch_tokens=64, epochs=1)) == [[7, 3, 0, 1], [4, 2, 5, 6]]


@given(lengths, st.integers(16, 50))
def test_micro_batches_cut_in_order(rows: list[int], limit: int) -> None:
    order = np.arange(len(rows))[::-1]
    runs = micro_batches(order, np.array(rows), limit)
    assert np.concatenate(runs).tolist() == order.tolist()
    assert all(len(run) == 1 or sum(rows[n] for n in run) <= limit for run in runs)
