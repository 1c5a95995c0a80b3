"""AdamW against torch's, clipping, and the learning-rate schedule by hand."""

from __future__ import annotations

import math

import pytest
import torch

from finery_gpu_workers.optim import AdamW, FlatParameters, clip
from finery_gpu_workers.schedules import learning_rate


def test_adamw_equals_torchs() -> None:
    generator = torch.Generator().manual_seed(0)
    initial = {"a": torch.randn(3, 4, generator=generator), "b": torch.randn(5, generator=generator)}
    flat = FlatParameters(initial, "cpu")
    ours = AdamW(flat.values, weight_decay=0.1)
    peers = [value.clone().requires_grad_() for value in initial.values()]
    peer = torch.optim.AdamW(peers, lr=1.0, weight_decay=0.1)
    for step in range(10):
        rate = 0.01 * (step + 1)
        for view, other in zip(flat.views.values(), peers, strict=True):
            other.grad = torch.randn(view.shape, generator=generator)
            view.grad.copy_(other.grad)  # type: ignore[union-attr]
        peer.param_groups[0]["lr"] = rate
        peer.step()
        ours.step(flat.values, flat.gradients, rate)
        for view, other in zip(flat.views.values(), peers, strict=True):
            torch.testing.assert_close(view, other, rtol=1e-6, atol=1e-7)


def test_gradients_of_views_accumulate_in_the_flat_buffer() -> None:
    flat = FlatParameters({"a": torch.tensor([2.0]), "b": torch.tensor([[3.0, 5.0]])}, "cpu")
    for _ in range(2):
        (flat.views["a"] * flat.views["b"]).sum().backward()
    # Matrices lie first.
    assert flat.gradients.tolist() == [4.0, 4.0, 16.0]
    assert flat.matrices == 2
    assert {name: part.tolist() for name, part in flat.named(flat.values).items()} == {"a": [2.0], "b": [[3.0, 5.0]]}


def test_weight_decay_is_for_matrices_only_as_in_two_groups_of_torchs() -> None:
    generator = torch.Generator().manual_seed(0)
    initial = {"norm": torch.randn(5, generator=generator), "matrix": torch.randn(300, 400, generator=generator)}
    flat = FlatParameters(initial, "cpu")
    ours = AdamW(flat.values, weight_decay=0.1, decayed=flat.matrices)
    norm, matrix = (value.clone().requires_grad_() for value in initial.values())
    groups = [{"params": [matrix], "weight_decay": 0.1}, {"params": [norm], "weight_decay": 0.0}]
    peer = torch.optim.AdamW(groups, lr=0.01)
    for _ in range(3):
        for view, other in ((flat.views["norm"], norm), (flat.views["matrix"], matrix)):
            other.grad = torch.randn(view.shape, generator=generator)
            view.grad.copy_(other.grad)  # type: ignore[union-attr]
        peer.step()
        ours.step(flat.values, flat.gradients, 0.01)
    torch.testing.assert_close(flat.views["norm"], norm, rtol=1e-6, atol=1e-7)
    torch.testing.assert_close(flat.views["matrix"], matrix, rtol=1e-6, atol=1e-7)


@pytest.mark.parametrize(
    ("limit", "after"), [(1.0, [0.6, 0.8]), (5.0, [3.0, 4.0]), (9.0, [3.0, 4.0]), (None, [3.0, 4.0])]
)
def test_clipping_keeps_the_direction_and_reports_the_norm_before(limit: float | None, after: list[float]) -> None:
    gradients = torch.tensor([3.0, 4.0])
    assert clip(gradients, limit) == 5.0
    assert gradients.tolist() == pytest.approx(after)


@pytest.mark.parametrize("bad", [math.nan, math.inf])
def test_a_non_finite_norm_is_reported(bad: float) -> None:
    assert not math.isfinite(clip(torch.tensor([1.0, bad]), 1.0))


def test_the_schedule_by_hand() -> None:
    def rates(total: int, schedule: str, warmup: float) -> list[float]:
        return [learning_rate(n, total, 1.0, schedule, warmup) for n in range(1, total + 1)]  # type: ignore[arg-type]

    assert rates(4, "constant", 0.0) == [1.0, 1.0, 1.0, 1.0]
    assert rates(4, "linear", 0.0) == pytest.approx([1.0, 0.75, 0.5, 0.25])
    assert rates(4, "cosine", 0.0) == pytest.approx([1.0, (1 + 2**-0.5) / 2, 0.5, (1 - 2**-0.5) / 2])
    assert rates(6, "linear", 0.3) == pytest.approx([0.5, 1.0, 1.0, 0.75, 0.5, 0.25])
    assert rates(1, "cosine", 0.03) == [1.0]
    assert rates(100, "constant", 0.03)[:4] == pytest.approx([1 / 3, 2 / 3, 1.0, 1.0])


@pytest.mark.parametrize("step", [0, 5])
def test_a_step_outside_the_run_is_refused(step: int) -> None:
    with pytest.raises(ValueError, match="expected 1 to 4"):
        learning_rate(step, 4, 1.0, "linear", 0.0)
