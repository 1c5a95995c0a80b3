"""The decoder's own backward passes against autograd of the plain formulas, and against finite differences."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.nn import functional

from finery_gpu_workers.losses.cross_entropy import cross_entropy
from finery_gpu_workers.models import attention, kernels, rope
from finery_gpu_workers.models.attention import attend

torch.set_num_threads(1)

Function = Callable[..., Tensor]


def normal(*shape: int, seed: int = 0) -> Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)


def plain_norm(x: Tensor, weight: Tensor) -> Tensor:
    return functional.rms_norm(x, weight.shape, weight, 1e-5)


def plain_swiglu(x: Tensor) -> Tensor:
    gate, up = x.chunk(2, dim=-1)
    return gate * torch.sigmoid(gate) * up


ANGLES = torch.outer(torch.arange(7, dtype=torch.float64), torch.tensor([1.0, 0.3, 0.1], dtype=torch.float64))
COS, SIN = (torch.cat((f(ANGLES), f(ANGLES)), dim=-1)[:, None] for f in (torch.cos, torch.sin))


def turned(x: Tensor) -> Tensor:
    return kernels.rotate(x, COS.to(x.dtype), SIN.to(x.dtype))


def plain_turned(x: Tensor) -> Tensor:
    return rope.rotate(x, COS.to(x.dtype), SIN.to(x.dtype))


def lora(x: Tensor, *factors: Tensor) -> Tensor:
    """Two layers in one matrix; the second's adapter is missing."""
    ups = [factors[1], factors[1].new_zeros(3, 0)]
    return kernels.lora_linear(x, WEIGHT.to(x.dtype), BIAS.to(x.dtype), factors[:1], ups, 0.5)


def plain_lora(x: Tensor, *factors: Tensor) -> Tensor:
    up = torch.cat((factors[1], factors[1].new_zeros(3, 2)))
    return functional.linear(x, WEIGHT.to(x.dtype), BIAS.to(x.dtype)) + 0.5 * functional.linear(
        functional.linear(x, factors[0]), up
    )


WEIGHT, BIAS = normal(9, 5, seed=7), normal(9, seed=8)
TARGETS, WEIGHTS = torch.tensor([3, 0, 2, 1]), torch.tensor([1.0, 0.5, 0.0, 2.0])


def loss(logits: Tensor) -> Tensor:
    return cross_entropy(logits, TARGETS, WEIGHTS.to(logits.dtype)).numerator


def plain_loss(logits: Tensor) -> Tensor:
    return (functional.cross_entropy(logits, TARGETS, reduction="none") * WEIGHTS).sum()


def embedded(weight: Tensor) -> Tensor:
    return kernels.embed(torch.tensor([1, 4, 1, 1, 0]), weight)


def plain_embedded(weight: Tensor) -> Tensor:
    return weight[torch.tensor([1, 4, 1, 1, 0])]


def heads(x: Tensor) -> Tensor:
    q, k, v = x.split([4, 2, 2], dim=1)
    return attend(q, k, v, (3, 3, 5))


def plain_heads(x: Tensor) -> Tensor:
    outputs = []
    for row in x.split([3, 3, 5]):
        q, k, v = (part.transpose(0, 1) for part in row.split([4, 2, 2], dim=1))
        k, v = k.repeat_interleave(2, dim=0), v.repeat_interleave(2, dim=0)
        scores = q @ k.transpose(1, 2) * q.shape[-1] ** -0.5
        future = torch.ones(len(row), len(row), dtype=torch.bool).triu(1)
        mixed = torch.softmax(scores.masked_fill(future, float("-inf")), dim=-1) @ v
        outputs.append(mixed.transpose(0, 1).flatten(1))
    return torch.cat(outputs)


CASES: dict[str, tuple[Function, Function, list[Tensor]]] = {
    "norm": (lambda x, w: kernels.rms_norm(x, w, 1e-5), plain_norm, [normal(6, 8), normal(8, seed=1)]),
    "norm of heads": (lambda x, w: kernels.rms_norm(x, w, 1e-5), plain_norm, [normal(6, 3, 4), normal(4, seed=1)]),
    "swiglu": (kernels.swiglu, plain_swiglu, [normal(6, 10)]),
    "rotation": (turned, plain_turned, [normal(7, 2, 6)]),
    "lora": (lora, plain_lora, [normal(6, 5), normal(2, 5, seed=1), normal(6, 2, seed=2)]),
    "cross entropy": (loss, plain_loss, [normal(4, 5)]),
    "embedding": (embedded, plain_embedded, [normal(6, 3)]),
    "attention": (heads, plain_heads, [normal(11, 8, 4)]),
}


@pytest.fixture(autouse=True, params=["blocks", "one block"])
def _blocks(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> None:
    if request.param == "blocks":
        monkeypatch.setattr(kernels, "_BLOCK", 24)
        monkeypatch.setattr(attention, "_BLOCK", 2)


def with_gradients(function: Function, inputs: list[Tensor], dtype: torch.dtype) -> list[Tensor]:
    leaves = [x.to(dtype, copy=True).requires_grad_() for x in inputs]
    output = function(*leaves)
    output.backward(normal(*output.shape, seed=99).to(dtype))
    return [output.detach(), *(x.grad for x in leaves if x.grad is not None)]


@pytest.mark.parametrize("case", CASES)
def test_values_and_gradients_equal_autograd_of_the_formula(case: str) -> None:
    ours, plain, inputs = CASES[case]
    found, expected = (with_gradients(f, inputs, torch.float32) for f in (ours, plain))
    assert len(found) == len(expected) == 1 + len(inputs)
    for one, other in zip(found, expected, strict=True):
        assert float(other.norm()) > 0
        assert float((one - other).norm() / other.norm()) <= 1e-5


@pytest.mark.parametrize("case", CASES)
def test_gradients_equal_finite_differences_in_double(case: str) -> None:
    function, _, inputs = CASES[case]
    assert torch.autograd.gradcheck(function, [x.clone().requires_grad_() for x in inputs])


@pytest.mark.parametrize("case", CASES)
def test_bf16_is_as_near_to_the_truth_as_the_plain_formula_in_bf16(case: str) -> None:
    ours, plain, inputs = CASES[case]
    rounded: list[Any] = [x.bfloat16().double() for x in inputs]
    truth = with_gradients(plain, rounded, torch.float64)
    errors = []
    for function in (ours, plain):
        found = with_gradients(function, rounded, torch.bfloat16)
        errors.append([float((a - b).norm() / b.norm()) for a, b in zip(found, truth, strict=True)])
    for mine, plains in zip(*errors, strict=True):
        assert mine <= max(1.5 * plains, 5e-3)


@pytest.mark.parametrize("case", CASES)
def test_inputs_are_left_as_they_are(case: str) -> None:
    function, _, inputs = CASES[case]
    leaves = [x.clone().requires_grad_() for x in inputs]
    function(*leaves).sum().backward()
    assert all(torch.equal(leaf, x) for leaf, x in zip(leaves, inputs, strict=True))


@torch.no_grad()
def test_a_confident_model_has_an_exact_loss_and_a_tiny_one_where_it_is_right() -> None:
    logits = torch.tensor([[200.0, 0.0, -200.0], [20.0, 0.0, 0.0]])
    sure = [float(cross_entropy(logits[:1], torch.tensor([n]), torch.ones(1)).numerator) for n in range(3)]
    assert sure == pytest.approx([0.0, 200.0, 400.0])
    near = float(cross_entropy(logits[1:].double(), torch.tensor([0]), torch.ones(1)).numerator)
    assert near == pytest.approx(4.122307236580956e-09, rel=1e-6)  # log(1 + 2 exp(-20))
