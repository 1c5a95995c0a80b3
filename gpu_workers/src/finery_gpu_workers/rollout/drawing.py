"""Tokens drawn from logits: filters, the inverse of the cumulated distribution, and the log-prob of what was drawn."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from finery_gpu_workers.errors import WorkerError
from finery_gpu_workers.rollout.types import Sampling

# Chances are summed by blocks of this many tokens, so that only one block of a row is summed token by token.
_BLOCK = 256
# The likeliest tokens that are looked at first where `top_p` cuts; more only where these do not reach it.
_LIKELIEST = 512
# A sum of float32 numbers that should be top_p may miss it by this, relatively.
_ROUNDING = 2.0**-20

Floats = NDArray[np.float64]


@dataclass(frozen=True)
class Drawn:
    tokens: NDArray[np.int64]
    """[n]"""
    log_probs: NDArray[np.float32]
    """[n], in the filtered and normalised distribution"""


def draw(logits: Tensor, sampling: Sampling, uniforms: Floats) -> Drawn:
    """logits [n, vocab] of any float dtype, uniforms [n] in [0, 1) → one token per row.

    With p = softmax(logits / temperature), 0 for what the filters drop: the first token t with
    Σ_{i ≤ t} p[i] > uniform · Σ p, and log(p[t] / Σ p). Filters keep the first n tokens in the order of falling chance,
    of equals the lower id first. Raises WorkerError `non_finite_logits`.
    """
    wide, greedy = logits.float(), sampling.temperature == 0
    if not greedy and sampling.temperature != 1:
        wide = wide / sampling.temperature
    shares = torch.softmax(wide, -1)
    if not greedy:
        _filter(shares, sampling)
    blocks = _blocks(shares)
    sums = blocks.sum(-1).cpu().numpy().astype(np.float64)
    totals = sums.sum(-1)
    if not np.isfinite(totals).all():
        raise WorkerError("non_finite_logits", "expected finite logits of the model, found NaN or infinity")
    tokens = wide.argmax(-1).cpu().numpy() if greedy else _inverse(blocks, sums, uniforms * totals)
    chosen = shares.gather(1, torch.from_numpy(tokens).to(shares.device)[:, None])[:, 0]
    log_probs = np.log(chosen.cpu().numpy().astype(np.float64) / totals)
    return Drawn(tokens, log_probs.astype(np.float32))


def _blocks(shares: Tensor) -> Tensor:
    """[n, vocab] → [n, blocks, block], filled up with zeros."""
    missing = -shares.shape[1] % _BLOCK
    if missing:
        shares = torch.nn.functional.pad(shares, (0, missing))
    return shares.view(len(shares), -1, _BLOCK)


def _inverse(blocks: Tensor, sums: Floats, targets: Floats) -> NDArray[np.int64]:
    """The token in which the cumulated shares pass the target; one whose share is 0 never is."""
    rows = np.arange(len(sums))
    ends = sums.cumsum(-1)
    block = _first_above(ends, targets, sums)
    before = ends[rows, block] - sums[rows, block]
    where = torch.from_numpy(block).to(blocks.device)
    inside = blocks[torch.arange(len(blocks), device=blocks.device), where].cpu().numpy().astype(np.float64)
    return block * _BLOCK + _first_above(inside.cumsum(-1), targets - before, inside)


def _first_above(ends: Floats, targets: Floats, parts: Floats) -> NDArray[np.int64]:
    """[n, m], [n], [n, m] → [n]: the first place whose end is above the target, or, where rounding left none, the last
    with a share."""
    above = ends > targets[:, None]
    last = parts.shape[1] - 1 - (parts > 0)[:, ::-1].argmax(-1)
    found: NDArray[np.int64] = np.where(above.any(-1), above.argmax(-1), last)
    return found


def _filter(shares: Tensor, sampling: Sampling) -> None:
    """Sets the shares of dropped tokens to 0. `min_p` is relative to the likeliest token."""
    vocab = shares.shape[1]
    keep_at_most = min(sampling.top_k or vocab, vocab)
    if sampling.top_p < 1.0 or keep_at_most < vocab:
        _keep_first(shares, *_cut(shares, keep_at_most, sampling.top_p))
    if sampling.min_p > 0.0:
        shares.masked_fill_(shares < sampling.min_p * shares.amax(-1, keepdim=True), 0.0)


def _cut(shares: Tensor, at_most: int, top_p: float) -> tuple[Tensor, Tensor]:
    """The share of the last token that is kept [n, 1], and how many are kept [n, 1]."""
    vocab = shares.shape[1]
    looked_at = at_most if at_most < vocab else min(vocab, _LIKELIEST)
    while True:
        likeliest = shares.topk(looked_at, dim=-1).values
        sums = likeliest.cpu().numpy().astype(np.float64).cumsum(-1)
        totals = sums[:, -1] if at_most < vocab else shares.sum(-1, dtype=torch.float64).cpu().numpy()
        reached = sums >= (top_p * (1 - _ROUNDING) * totals)[:, None] if top_p < 1.0 else np.zeros(sums.shape, bool)
        if looked_at >= at_most or reached[:, -1].all():
            break
        looked_at = min(vocab, looked_at * 8)
    counts = np.where(reached.any(-1), reached.argmax(-1) + 1, looked_at)[:, None]
    kept = torch.from_numpy(counts).to(shares.device)
    return likeliest.gather(1, kept - 1), kept


def _keep_first(shares: Tensor, bound: Tensor, kept: Tensor) -> None:
    """Those above the bound, and of those on it as many as are missing, lower ids first."""
    missing = kept - (shares > bound).sum(-1, keepdim=True)
    on_it = shares == bound
    dropped = shares < bound
    if bool((on_it.sum(-1, keepdim=True) > missing).any()):
        dropped |= on_it & (on_it.cumsum(-1) > missing)
    shares.masked_fill_(dropped, 0.0)
