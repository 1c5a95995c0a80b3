"""Learning rates by hand, and against transformers."""

from __future__ import annotations

import pytest
import torch
from transformers import get_wsd_schedule

from finery.types.methods import Schedule
from finery_gpu_workers.schedules import learning_rate


def rates(total: int, schedule: Schedule, warmup: float = 0.0, decay: float = 0.2) -> list[float]:
    return [learning_rate(n, total, 1.0, schedule, warmup, decay) for n in range(1, total + 1)]


def test_wsd_by_hand() -> None:
    """Two steps up, stable, then a fall over the last 4 of 10: 4/4, 3/4, 2/4, 1/4."""
    assert rates(10, "wsd", 0.2, 0.4) == pytest.approx([0.5, 1, 1, 1, 1, 1, 1, 0.75, 0.5, 0.25])
    assert rates(5, "wsd", 0.0, 0.2) == [1.0] * 5  # the fall is one step long
    assert rates(3, "wsd", 0.0, 0.5) == pytest.approx([1, 1, 0.5])  # ⌈1.5⌉ steps
    assert rates(1, "wsd", 0.03, 0.2) == [1.0]


def test_wsd_that_only_falls_is_linear() -> None:
    for warmup in (0.0, 0.25):
        assert rates(8, "wsd", warmup, 1.0) == pytest.approx(rates(8, "linear", warmup))


def test_a_fall_never_begins_before_the_warm_up_is_over() -> None:
    """0.5 and 0.75 of 8 steps overlap: the fall gets the 4 steps that are left."""
    assert rates(8, "wsd", 0.5, 0.75) == pytest.approx([0.25, 0.5, 0.75, 1, 1, 0.75, 0.5, 0.25])


def test_decay_ratio_of_other_schedules_changes_nothing() -> None:
    for schedule in ("linear", "cosine", "constant"):
        assert rates(7, schedule, 0.2, 0.1) == rates(7, schedule, 0.2, 0.9)


@pytest.mark.parametrize(("total", "decay"), [(10, 0.2), (30, 0.5), (100, 1.0)])
def test_wsd_without_warm_up_is_that_of_transformers(total: int, decay: float) -> None:
    optimizer = torch.optim.SGD([torch.zeros(1, requires_grad=True)], lr=1.0)
    peer = get_wsd_schedule(
        optimizer, num_warmup_steps=0, num_decay_steps=round(decay * total), num_training_steps=total,
        warmup_type="linear", decay_type="linear",
    )  # fmt: skip
    expected = []
    for _ in range(total):
        expected.append(peer.get_last_lr()[0])
        optimizer.step()
        peer.step()
    assert rates(total, "wsd", 0.0, decay) == pytest.approx(expected)
