"""Attention against torch's own, row by row."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor
from torch.nn.functional import scaled_dot_product_attention

from finery_gpu_workers.models import attention
from finery_gpu_workers.models.attention import attend

HEADS, KV_HEADS, WIDTH = 6, 2, 8


def rows_by_torch(q: Tensor, k: Tensor, v: Tensor, lengths: tuple[int, ...]) -> Tensor:
    """Every row alone, every query head with a key of its own."""
    outputs = []
    for parts in zip(*(x.split(lengths) for x in (q, k, v)), strict=True):
        query, key, value = (x.repeat_interleave(HEADS // x.shape[1], dim=1).transpose(0, 1)[None] for x in parts)
        mixed = scaled_dot_product_attention(query, key, value, is_causal=True)[0]
        outputs.append(mixed.transpose(0, 1).reshape(-1, HEADS * WIDTH))
    return torch.cat(outputs)


@pytest.mark.parametrize("longest", [1024, 100], ids=["matmuls", "long rows fused"])
def test_packed_rows_of_any_length_attend_as_each_alone_does(longest: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(attention, "_MATMUL_UP_TO", longest)
    lengths = (1, 128, 129, 129, 300, 5, 257)
    generator = torch.Generator().manual_seed(0)
    inputs = [torch.randn(sum(lengths), heads, WIDTH, generator=generator) for heads in (HEADS, KV_HEADS, KV_HEADS)]
    upstream = torch.randn(sum(lengths), HEADS * WIDTH, generator=generator)
    results = []
    for function in (attend, rows_by_torch):
        leaves = [x.clone().requires_grad_() for x in inputs]
        output = function(leaves[0], leaves[1], leaves[2], lengths)
        output.backward(upstream)
        results.append([output, *(leaf.grad for leaf in leaves)])
    for found, expected in zip(*results, strict=True):
        torch.testing.assert_close(found, expected, rtol=1e-5, atol=1e-5)
