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


def shared_by_torch(q: Tensor, k: Tensor, v: Tensor, lengths: tuple[int, ...], parents: tuple[int, ...]) -> Tensor:
    """Every row alone, its parent's keys and values in front of its own."""
    outputs = []
    keys, values = k.split(lengths), v.split(lengths)
    for row, query in enumerate(q.split(lengths)):
        before = [parents[row]] if parents[row] >= 0 else []
        whole = [torch.cat([x[n] for n in (*before, row)]) for x in (keys, values)]
        key, value = (x.repeat_interleave(HEADS // KV_HEADS, dim=1).transpose(0, 1)[None] for x in whole)
        seen = torch.ones(len(query), key.shape[2], dtype=torch.bool).tril(key.shape[2] - len(query))
        mixed = scaled_dot_product_attention(query.transpose(0, 1)[None], key, value, attn_mask=seen)[0]
        outputs.append(mixed.transpose(0, 1).reshape(-1, HEADS * WIDTH))
    return torch.cat(outputs)


ONE_LONG = (20, 255, *(5,) * 31), (-1, *(0,) * 32)
"""A prefix, whose branches are one long one and many short ones."""


def test_one_long_branch_does_not_make_the_short_ones_long() -> None:
    segments = attention._segments(*ONE_LONG)
    assert sum(segment.tokens for segment in segments) == sum(ONE_LONG[0])
    padded = sum(len(segment.lengths) * max(segment.lengths) for segment in segments)
    assert padded < 20 + 2 * (255 + 31 * 5) + 8 * 128  # and not 32 times 255


@pytest.mark.parametrize("longest", [1024, 100], ids=["matmuls", "long rows fused"])
@pytest.mark.parametrize(
    ("lengths", "parents"),
    [
        # A plain row; a prefix with branches of unequal lengths, some over a block; two prefixes, whose branches
        # alternate.
        (
            (7, 60, 1, 40, 129, 300, 130, 5, 5, 12, 3, 3, 3, 9),
            (-1, -1, 1, 1, 1, 1, 1, -1, -1, -1, 8, 9, 8, 9),
        ),
        ONE_LONG,
    ],
)
def test_rows_that_go_on_from_a_prefix_attend_to_it_and_to_themselves(
    lengths: tuple[int, ...], parents: tuple[int, ...], longest: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(attention, "_MATMUL_UP_TO", longest)
    generator = torch.Generator().manual_seed(0)
    inputs = [torch.randn(sum(lengths), heads, WIDTH, generator=generator) for heads in (HEADS, KV_HEADS, KV_HEADS)]
    upstream = torch.randn(sum(lengths), HEADS * WIDTH, generator=generator)
    results = []
    for function in (attend, shared_by_torch):
        leaves = [x.clone().requires_grad_() for x in inputs]
        output = function(leaves[0], leaves[1], leaves[2], lengths, parents)
        output.backward(upstream)
        results.append([output, *(leaf.grad for leaf in leaves)])
    for found, expected in zip(*results, strict=True):
        torch.testing.assert_close(found, expected, rtol=1e-5, atol=1e-5)
