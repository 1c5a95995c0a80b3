"""Causal attention over packed rows: a row sees itself only."""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.autograd.function import once_differentiable

# On a CPU plain matmuls beat the fused kernel up to about this row length.
_MATMUL_UP_TO = 1024
# Queries that are computed together. Per layer of SmolLM2, forward and backward, one core: at 512 tokens 40 ms against
# 52 in one block and 43 fused; at 1024 80 against 205 and 73.
_BLOCK = 128


def attend(q: Tensor, k: Tensor, v: Tensor, lengths: tuple[int, ...]) -> Tensor:
    """q [T, heads, d], k and v [T, kv_heads, d]; T = sum of the rows' lengths. Returns [T, heads × d].

    Neighbouring rows of one length are computed together.
    """
    total, heads, width = q.shape
    outputs, start = [], 0
    for count, length in _runs(lengths):
        rows = slice(start, start + count * length)
        shaped = (x[rows].view(count, length, -1, width) for x in (q, k, v))
        on_cpu = q.device.type == "cpu" and length <= _MATMUL_UP_TO
        outputs.append((_matmul if on_cpu else _fused)(*shaped).reshape(count * length, heads * width))
        start = rows.stop
    if start != total:
        raise ValueError(f"lengths: expected a sum of {total} tokens, found {start}")
    return outputs[0] if len(outputs) == 1 else torch.cat(outputs)


def _runs(lengths: tuple[int, ...]) -> list[tuple[int, int]]:
    """(number of neighbours, their common length)"""
    runs: list[tuple[int, int]] = []
    for length in lengths:
        if runs and runs[-1][1] == length:
            runs[-1] = (runs[-1][0] + 1, length)
        else:
            runs.append((1, length))
    return runs


class _Matmul(torch.autograd.Function):
    """A block of queries meets the keys up to its own end only, so that most of the future is not computed at all.

    The heads that share a key are folded into its query rows. With P = softmax(S), S = scale · Q Kᵀ + mask, O = P V:
    dV = Pᵀ dO, dS = P ⊙ (dP − rowsum(P ⊙ dP)) with dP = dO Vᵀ, dQ = scale · dS K, dK = scale · dSᵀ Q.
    """

    @staticmethod
    def forward(ctx: Any, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        count, length, heads, width = q.shape
        kv_heads = k.shape[2]
        keys, values = (x.transpose(1, 2).reshape(count * kv_heads, length, width) for x in (k, v))
        queries, output = q.unflatten(2, (kv_heads, -1)), q.new_empty(q.shape)
        outputs = output.unflatten(2, (kv_heads, -1))
        shares = []
        for start in range(0, length, _BLOCK):
            end = min(start + _BLOCK, length)
            future = torch.full((end - start, end), float("-inf"), dtype=q.dtype, device=q.device).triu(1 + start)
            mask, folded = future.repeat(heads // kv_heads, 1), _fold(queries[:, start:end])
            scores = torch.baddbmm(mask, folded, keys[:, :end].transpose(1, 2), alpha=width**-0.5)
            shares.append(torch.softmax(scores, dim=-1))
            _unfold(torch.bmm(shares[-1], values[:, :end]), outputs[:, start:end])
        ctx.save_for_backward(q, keys, values, *shares)
        return output

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, doutput: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        q, keys, values, *shares = ctx.saved_tensors
        count, length, _, width = q.shape
        kv_heads, scale = len(keys) // count, width**-0.5
        queries, doutputs = (x.unflatten(2, (kv_heads, -1)) for x in (q, doutput))
        dq, dkeys, dvalues = q.new_empty(q.shape), torch.empty_like(keys), torch.empty_like(values)
        dqueries = dq.unflatten(2, (kv_heads, -1))
        # From the last block, which meets all keys and so writes the whole gradient, to the first.
        for start in reversed(range(0, length, _BLOCK)):
            end, share = min(start + _BLOCK, length), shares[start // _BLOCK]
            dmixed = _fold(doutputs[:, start:end])
            dshare = torch.bmm(dmixed, values[:, :end].transpose(1, 2))
            dscores = torch.ops.aten._softmax_backward_data(dshare, share, -1, share.dtype)
            last = 0 if end == length else 1
            folded = _fold(queries[:, start:end])
            dvalues[:, :end].baddbmm_(share.transpose(1, 2), dmixed, beta=last)
            dkeys[:, :end].baddbmm_(dscores.transpose(1, 2), folded, beta=last, alpha=scale)
            _unfold(torch.bmm(dscores, keys[:, :end]).mul_(scale), dqueries[:, start:end])
        dk, dv = (x.view(count, kv_heads, length, width).transpose(1, 2) for x in (dkeys, dvalues))
        return dq, dk, dv


def _matmul(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    """q [n, L, heads, d], k and v [n, L, kv_heads, d] → [n, L, heads, d]"""
    return _Matmul.apply(q, k, v)  # type: ignore[no-any-return, no-untyped-call]


def _fold(x: Tensor) -> Tensor:
    """[n, L, kv_heads, group, d] → [n × kv_heads, group × L, d]"""
    count, length, kv_heads, group, width = x.shape
    return x.permute(0, 2, 3, 1, 4).reshape(count * kv_heads, group * length, width)


def _unfold(x: Tensor, target: Tensor) -> None:
    """Undoes `_fold` into `target`."""
    count, length, kv_heads, group, width = target.shape
    target.permute(0, 2, 3, 1, 4).copy_(x.view(count, kv_heads, group, length, width))


def _fused(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    q, k, v = q.transpose(1, 2), k.transpose(1, 2), v.transpose(1, 2)
    return F.scaled_dot_product_attention(q, k, v, is_causal=True, enable_gqa=True).transpose(1, 2)
