"""Layers made ready for decoding equal the projections that they were made of, at every number of tokens."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from finery.types.methods import LoraAdapter
from finery_gpu_workers.models.decoder import Projection
from finery_gpu_workers.models.lora import LoraDelta
from finery_gpu_workers.rollout.linear import Linear, laid_out

NAMES, SIZES, INPUTS = ("m.q_proj", "m.k_proj"), (96, 64), 80


def drawn(*shape: int, seed: int) -> Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed)).div_(shape[-1] ** 0.5)


def projection(*, bias: bool, adapted: tuple[str, ...]) -> Projection:
    made = Projection(
        drawn(160, INPUTS, seed=0).bfloat16(), NAMES, SIZES, drawn(160, seed=1).bfloat16() if bias else None
    )
    views = {f"{name}.lora_A": drawn(4, INPUTS, seed=2) for name in adapted}
    views |= {f"{n}.lora_B": drawn(size, 4, seed=3) for n, size in zip(NAMES, SIZES, strict=True) if n in adapted}
    if adapted:
        made.delta = LoraDelta(made, LoraAdapter(rank=4, alpha=6), views)
    return made


@pytest.mark.parametrize("tokens", [1, 31, 32, 33])
@pytest.mark.parametrize("bias", [True, False])
@pytest.mark.parametrize("adapted", [(), NAMES, NAMES[1:]], ids=len)
def test_a_layer_equals_its_projection(tokens: int, bias: bool, adapted: tuple[str, ...]) -> None:
    """In bf16, against the projection in float32: an error of a few roundings (2⁻⁹ of numbers around 1)."""
    made = projection(bias=bias, adapted=adapted)
    x, residual = (drawn(tokens, n, seed=5 + n).bfloat16() * n**0.5 for n in (INPUTS, 160))
    with torch.no_grad():
        wide = Projection(made.weight.float(), NAMES, SIZES, None if made.bias is None else made.bias.float())
        if made.delta is not None:
            wide.delta = made.delta
        expected = wide(x.float())
        layer = Linear.of(made, torch.bfloat16)
        torch.testing.assert_close(layer(x).float(), expected, rtol=0.01, atol=0.03)
        torch.testing.assert_close(layer(laid_out(x)), layer(x), rtol=0, atol=0)
        onto = laid_out(residual.clone())
        layer.onto(onto, x)
        torch.testing.assert_close(onto.float(), residual.float() + expected, rtol=0.01, atol=0.04)


def test_weights_are_not_copied() -> None:
    made = projection(bias=True, adapted=NAMES)
    layer = Linear.of(made, torch.bfloat16)
    assert layer.weight.data_ptr() == made.weight.data_ptr()
    assert layer.bias is made.bias
