"""Causal attention over packed rows: a row sees itself, and its parent where it has one."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import lru_cache
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
# Padding that is cheaper than a pass of its own.
_SPARE = 8 * _BLOCK


@dataclass(frozen=True)
class _Segment:
    """Neighbouring rows that are computed together: of one length, or with one parent."""

    lengths: tuple[int, ...]
    parent: int = -1
    """The row that they go on from."""

    @property
    def tokens(self) -> int:
        return sum(self.lengths)


@dataclass(frozen=True)
class _Padding:
    """Rows of unequal lengths on a grid; what pads them lies behind them, where no query of theirs sees it."""

    places: Tensor
    """int64 [rows × longest], the token in each place, any one where there is none"""
    kept: Tensor
    """int64 [tokens], the place of each token"""


def attend(q: Tensor, k: Tensor, v: Tensor, lengths: tuple[int, ...], parents: tuple[int, ...] = ()) -> Tensor:
    """q [T, heads, d], k and v [T, kv_heads, d]; T = sum of the rows' lengths. Returns [T, heads × d].

    A row sees itself, and the whole row that is its parent (-1: none), which comes before it. Neighbouring rows of one
    length, and those of one parent, are computed together.
    """
    total, heads, width = q.shape
    segments = _segments(lengths, parents)
    sizes = [segment.tokens for segment in segments]
    if sum(sizes) != total:
        raise ValueError(f"lengths: expected a sum of {total} tokens, found {sum(sizes)}")
    # Their gradients are joined in one pass each; those of slices would be filled with zeros, slice by slice.
    queries, keys, values = (x.split(sizes) for x in (q, k, v))
    pasts = _pasts(segments, keys, values)
    outputs = [
        _rows(segment, queries[n], keys[n], values[n], pasts.get(segment.parent)).reshape(sizes[n], heads * width)
        for n, segment in enumerate(segments)
    ]
    return outputs[0] if len(outputs) == 1 else torch.cat(outputs)


def _pasts(
    segments: tuple[_Segment, ...], keys: Sequence[Tensor], values: Sequence[Tensor]
) -> dict[int, tuple[Tensor, Tensor]]:
    """Keys and values of every row that is a parent."""
    wanted = {segment.parent for segment in segments} - {-1}
    pasts, row = {}, 0
    for number, segment in enumerate(segments if wanted else ()):
        if row in wanted:
            pasts[row] = keys[number], values[number]
        row += len(segment.lengths)
    return pasts


def _rows(segment: _Segment, q: Tensor, k: Tensor, v: Tensor, past: tuple[Tensor, Tensor] | None) -> Tensor:
    """[tokens, heads, d] of each → [tokens, heads, d]"""
    count, longest = len(segment.lengths), max(segment.lengths)
    padding = _padding(segment.lengths, q.device) if segment.tokens < count * longest else None
    if padding is not None:
        q, k, v = (_Pad.apply(x, padding) for x in (q, k, v))  # type: ignore[no-untyped-call]
    q, k, v = (x.view(count, longest, *x.shape[1:]) for x in (q, k, v))
    reach = longest if past is None else longest + len(past[0])
    on_cpu = q.device.type == "cpu" and reach <= _MATMUL_UP_TO
    mixed = (_matmul if on_cpu else _fused)(q, k, v, past).flatten(0, 1)
    return mixed if padding is None else _Unpad.apply(mixed, padding)  # type: ignore[no-untyped-call]


@lru_cache(maxsize=8)
def _segments(lengths: tuple[int, ...], parents: tuple[int, ...]) -> tuple[_Segment, ...]:
    """Rows of one parent are together while their lengths are alike, so that little is padded; a parent is a segment of
    its own."""
    segments: list[list[int]] = []
    keys: list[tuple[int, int, int]] = []
    prefixes = frozenset(parents) - {-1}
    for row, length in enumerate(lengths):
        parent = parents[row] if parents else -1
        key = (parent, -1, length) if parent < 0 else (parent, -1, max(length, _BLOCK).bit_length())
        if row in prefixes:
            key = (-1, row, length)
        if keys and keys[-1] == key and (parent < 0 or _fits(segments[-1], length)):
            segments[-1].append(length)
        else:
            segments.append([length])
            keys.append(key)
    return tuple(_Segment(tuple(one), key[0]) for one, key in zip(segments, keys, strict=True))


def _fits(lengths: list[int], length: int) -> bool:
    padded = (len(lengths) + 1) * max(*lengths, length)
    return padded <= 2 * (sum(lengths) + length) + _SPARE


@lru_cache(maxsize=64)
def _padding(lengths: tuple[int, ...], device: torch.device) -> _Padding:
    longest = max(lengths)
    starts = torch.tensor(lengths).cumsum(0) - torch.tensor(lengths)
    inside = torch.arange(longest) < torch.tensor(lengths)[:, None]
    places = torch.where(inside, starts[:, None] + torch.arange(longest), 0).flatten()
    return _Padding(places.to(device), inside.flatten().nonzero()[:, 0].to(device))


class _Pad(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, padding: _Padding) -> Tensor:
        ctx.padding = padding
        return x[padding.places]

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, dy: Tensor) -> tuple[Tensor, None]:
        return dy[ctx.padding.kept], None


class _Unpad(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, padding: _Padding) -> Tensor:
        ctx.padding, ctx.shape = padding, x.shape
        return x[padding.kept]

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, dy: Tensor) -> tuple[Tensor, None]:
        return dy.new_zeros(ctx.shape).index_copy_(0, ctx.padding.kept, dy), None


class _Matmul(torch.autograd.Function):
    """A block of queries meets the keys up to its own end only, so that most of the future is not computed at all.

    The heads that share a key are folded into its query rows. With P = softmax(S), S = scale · Q Kᵀ + mask, O = P V:
    dV = Pᵀ dO, dS = P ⊙ (dP − rowsum(P ⊙ dP)) with dP = dO Vᵀ, dQ = scale · dS K, dK = scale · dSᵀ Q. The past lies
    before the keys of every row; its gradient is the sum over rows.
    """

    @staticmethod
    def forward(ctx: Any, q: Tensor, k: Tensor, v: Tensor, *past: Tensor) -> Tensor:
        _, length, heads, width = q.shape
        kv_heads = k.shape[2]
        keys, values = (_behind(x, past[n : n + 1]) for n, x in enumerate((k, v)))
        queries, output = q.unflatten(2, (kv_heads, -1)), q.new_empty(q.shape)
        outputs = output.unflatten(2, (kv_heads, -1))
        shares, before = [], keys.shape[1] - length
        for start in range(0, length, _BLOCK):
            end = min(start + _BLOCK, length)
            mask = _future(end - start, before + start, heads // kv_heads, q.dtype, q.device)
            folded = _fold(queries[:, start:end])
            scores = torch.baddbmm(mask, folded, keys[:, : before + end].transpose(1, 2), alpha=width**-0.5)
            shares.append(torch.softmax(scores, dim=-1))
            _unfold(torch.bmm(shares[-1], values[:, : before + end]), outputs[:, start:end])
        ctx.save_for_backward(q, keys, values, *shares)
        return output

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, doutput: Tensor) -> tuple[Tensor, ...]:
        q, keys, values, *shares = ctx.saved_tensors
        count, length, _, width = q.shape
        kv_heads, before, scale = len(keys) // count, keys.shape[1] - length, width**-0.5
        queries, doutputs = (x.unflatten(2, (kv_heads, -1)) for x in (q, doutput))
        dq, dkeys, dvalues = q.new_empty(q.shape), torch.empty_like(keys), torch.empty_like(values)
        dqueries = dq.unflatten(2, (kv_heads, -1))
        # From the last block, which meets all keys and so writes the whole gradient, to the first.
        for start in reversed(range(0, length, _BLOCK)):
            end, share = min(start + _BLOCK, length), shares[start // _BLOCK]
            met, last = slice(before + end), 0 if end == length else 1
            dmixed = _fold(doutputs[:, start:end])
            dshare = torch.bmm(dmixed, values[:, met].transpose(1, 2))
            dscores = torch.ops.aten._softmax_backward_data(dshare, share, -1, share.dtype)
            folded = _fold(queries[:, start:end])
            dvalues[:, met].baddbmm_(share.transpose(1, 2), dmixed, beta=last)
            dkeys[:, met].baddbmm_(dscores.transpose(1, 2), folded, beta=last, alpha=scale)
            _unfold(torch.bmm(dscores, keys[:, met]).mul_(scale), dqueries[:, start:end])
        dk, dv = (x.view(count, kv_heads, before + length, width).transpose(1, 2) for x in (dkeys, dvalues))
        own = dq, dk[:, before:], dv[:, before:]
        return (*own, dk[:, :before].sum(0), dv[:, :before].sum(0)) if before else own


@lru_cache(maxsize=64)
def _future(queries: int, before: int, group: int, dtype: torch.dtype, device: torch.device) -> Tensor:
    """[group × queries, before + queries], -inf where a key comes after its query; the same in every layer."""
    mask = torch.full((queries, before + queries), float("-inf"), dtype=dtype, device=device)
    return mask.triu(1 + before).repeat(group, 1)


def _behind(x: Tensor, past: Sequence[Tensor]) -> Tensor:
    """[n, L, kv_heads, d], behind [P, kv_heads, d] if there is a past → [n × kv_heads, P + L, d]"""
    count, _, kv_heads, width = x.shape
    whole = torch.cat((past[0].expand(count, *past[0].shape), x), dim=1) if past else x
    return whole.transpose(1, 2).reshape(count * kv_heads, -1, width)


def _matmul(q: Tensor, k: Tensor, v: Tensor, past: tuple[Tensor, Tensor] | None) -> Tensor:
    """q [n, L, heads, d], k and v [n, L, kv_heads, d], past ones [P, kv_heads, d] → [n, L, heads, d]"""
    return _Matmul.apply(q, k, v, *(past or ()))  # type: ignore[no-any-return, no-untyped-call]


def _fold(x: Tensor) -> Tensor:
    """[n, L, kv_heads, group, d] → [n × kv_heads, group × L, d]"""
    count, length, kv_heads, group, width = x.shape
    return x.permute(0, 2, 3, 1, 4).reshape(count * kv_heads, group * length, width)


def _unfold(x: Tensor, target: Tensor) -> None:
    """Undoes `_fold` into `target`."""
    count, length, kv_heads, group, width = target.shape
    target.permute(0, 2, 3, 1, 4).copy_(x.view(count, kv_heads, group, length, width))


def _fused(q: Tensor, k: Tensor, v: Tensor, past: tuple[Tensor, Tensor] | None) -> Tensor:
    mask = None
    if past is not None:
        k, v = (torch.cat((old.expand(len(x), *old.shape), x), dim=1) for old, x in zip(past, (k, v), strict=True))
        shape = q.shape[1], k.shape[1]
        mask = torch.ones(shape, dtype=torch.bool, device=q.device).tril(shape[1] - shape[0])
    q, k, v = q.transpose(1, 2), k.transpose(1, 2), v.transpose(1, 2)
    mixed = F.scaled_dot_product_attention(q, k, v, attn_mask=mask, is_causal=mask is None, enable_gqa=True)
    return mixed.transpose(1, 2)
