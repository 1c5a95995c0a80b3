"""Losses by hand; seeds."""

from __future__ import annotations

import math

import pytest
import torch

from finery_gpu_workers.losses.cross_entropy import cross_entropy
from finery_gpu_workers.seeds import derive, torch_threads


def test_cross_entropy_by_hand() -> None:
    # softmax of (0, ln 3) is (1/4, 3/4).
    logits = torch.tensor([[0.0, math.log(3)], [0.0, math.log(3)], [7.0, 7.0]])
    found = cross_entropy(logits, torch.tensor([0, 1, 1]), torch.tensor([1.0, 0.5, 0.0]))
    assert float(found.numerator) == pytest.approx(math.log(4) + 0.5 * math.log(4 / 3))
    assert found.tokens == 2


def test_cross_entropy_is_computed_in_float32() -> None:
    logits = torch.randn(4, 50, generator=torch.Generator().manual_seed(0)).bfloat16()
    targets, weights = torch.tensor([1, 2, 3, 4]), torch.ones(4)
    found = cross_entropy(logits, targets, weights).numerator
    assert found.dtype == torch.float32
    assert torch.equal(found, cross_entropy(logits.float(), targets, weights).numerator)


@pytest.mark.parametrize("denominator", [7, 1000])
def test_a_denominator_is_not_rounded_to_the_dtype_of_the_logits(denominator: int) -> None:
    """1 / 7 in bf16 is 0.3 % too small, and so was every gradient of the step."""
    generator = torch.Generator().manual_seed(0)
    logits = (3 * torch.randn(256, 64, generator=generator)).bfloat16().requires_grad_()
    targets, wide = torch.randint(64, (256,), generator=generator), logits.detach().float().requires_grad_()
    (cross_entropy(logits, targets, torch.ones(256)).numerator / denominator).backward()
    (torch.nn.functional.cross_entropy(wide, targets, reduction="sum") / denominator).backward()
    assert logits.grad is not None
    assert wide.grad is not None
    assert float(logits.grad.float().norm() / wide.grad.norm()) == pytest.approx(1.0, abs=1.5e-3)


@pytest.mark.parametrize("shapes", [((3, 2), (2,), (3,)), ((3, 2), (3,), (2,)), ((3,), (3,), (3,))])
def test_wrong_shapes_are_refused(shapes: tuple[tuple[int, ...], ...]) -> None:
    logits, targets, weights = (torch.zeros(shape) for shape in shapes)
    with pytest.raises(ValueError, match="expected logits"):
        cross_entropy(logits, targets.long(), weights)


def test_derived_seeds_differ_by_use_and_stay_the_same_for_ever() -> None:
    seeds = {derive(0, "epoch", 1), derive(0, "epoch", 2), derive(1, "epoch", 1), derive(0, "lora")}
    assert len(seeds) == 4
    assert all(0 <= seed < 2**63 for seed in seeds)
    # sha256 of "(0, 'epoch', 1)", first 8 bytes, halved.
    assert derive(0, "epoch", 1) == 3808558412218152728


def test_the_thread_count_is_fixed_by_the_environment() -> None:
    assert torch_threads({"FINERY_TORCH_THREADS": "3"}) == 3
    assert torch_threads({}) >= 1
    for bad in ("0", "-1", "two", ""):
        with pytest.raises(ValueError, match="FINERY_TORCH_THREADS"):
            torch_threads({"FINERY_TORCH_THREADS": bad})
