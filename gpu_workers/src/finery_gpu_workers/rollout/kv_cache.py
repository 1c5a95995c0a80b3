"""Keys and values of rows that are decoded together: a prompt's once for all its rows, and each row's own.

A step's attention is one softmax over both. The queries of a prompt's rows meet its keys in one matmul; for that they
are laid on a grid [prompts, rows of the largest group], whose empty places are zero and never read.
"""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass

import torch
from torch import Tensor

from finery_gpu_workers.models.config import DecoderConfig

# Steps, in tokens, in which the caches grow: kernels are made anew for every shape. They never are longer than needed:
# on a CPU a product with a part of them takes twice as long.
_STEP = 32


@dataclass(frozen=True, eq=False)
class CachedPrefix:
    """A prompt that was read."""

    kept: Tensor
    """[layers, 2, kv_heads, prompt, head_dim]: keys, values"""
    logits: Tensor
    """[vocab]"""

    @property
    def tokens(self) -> int:
        return self.kept.shape[3]


@dataclass(frozen=True)
class _Layer:
    """Views of a layer's caches, as matmuls take them."""

    own: Tensor
    """[2 × rows there is room for × kv_heads × own, head_dim]"""
    keys: Tensor
    """[rows × kv_heads, head_dim, own]"""
    values: Tensor
    """[rows × kv_heads, own, head_dim]"""
    prompt_keys: Tensor
    """[prompts × kv_heads, head_dim, prompt]"""
    prompt_values: Tensor
    """[prompts × kv_heads, prompt, head_dim]"""


class _Work:
    """What all layers and steps share until a row comes or goes, or a cache grows: views and room for what is between.
    Hundreds of small operations make a step, so that each one counts.
    """

    def __init__(self, own: list[Tensor], prompts: list[Tensor], places: list[int], share: int) -> None:
        _, _, kv_heads, self.own, width = own[0].shape
        self.prompt, self.rows, self.heads = prompts[0].shape[3], len(places), len(places) * kv_heads
        held, largest = max(places) + 1, max(Counter(places).values())
        self.layers = [_layer(*caches, self.rows, held) for caches in zip(own, prompts, strict=True)]
        self.at = torch.tensor(_on_grid(places, kv_heads, largest), device=own[0].device)
        """int64 [rows × kv_heads], where each is on the grid [prompts × kv_heads × rows of the largest group]"""
        grid, folded = held * kv_heads * largest, (held * kv_heads, largest * share)
        self.queries = own[0].new_zeros(grid, share, width)
        self.folded_queries = self.queries.view(*folded, width)
        self.folded_scores = own[0].new_zeros(*folded, self.prompt)
        self.prompt_scores = self.folded_scores.view(grid, share, self.prompt)
        self.scores = own[0].new_zeros(self.heads, share, self.prompt + self.own)
        self.by_row = self.scores.view(self.rows, kv_heads, share, -1)
        self.scores_of_prompt, self.scores_of_own = self.scores.split([self.prompt, self.own], dim=-1)
        self.looks = torch.zeros_like(self.scores)
        self.looks_at_prompt, self.looks_at_own = self.looks.split([self.prompt, self.own], dim=-1)
        self.prompt_looks = torch.zeros_like(self.prompt_scores)
        self.folded_looks = self.prompt_looks.view(self.folded_scores.shape)


@dataclass(frozen=True)
class _Step:
    """What all layers of a step share."""

    work: _Work
    mask: Tensor
    """[rows, 1, 1, prompt + own], 0 or -inf"""
    written: Tensor
    """int64 [rows × 2 × kv_heads], where this step's keys and values go"""


class KvCache:
    """Rows are numbered from 0; when one retires, the last takes its number. Memory is
    `bytes_per_token` × (most rows that there were × own tokens of the longest + most prompts × tokens of the longest),
    with lengths rounded up to 32.
    """

    def __init__(self, config: DecoderConfig, like: Tensor) -> None:
        """`like` gives dtype and device."""
        self._config = config
        self._share = config.heads // config.kv_heads
        self._prompts = [like.new_zeros(2, 0, config.kv_heads, 0, config.head_dim) for _ in range(config.layers)]
        self._own = list(self._prompts)
        self._held: list[CachedPrefix | None] = []
        """By place in `_prompts`; those of `_new` places are not there yet."""
        self._new: set[int] = set()
        self._place: list[int] = []
        """Of each row's prompt."""
        self._length: list[int] = []
        """Of each row's own part."""
        self._work: _Work | None = None

    def __len__(self) -> int:
        return len(self._place)

    def memory(self) -> int:
        """Bytes."""
        return sum(cache.nbytes for cache in (*self._prompts, *self._own))

    def positions(self) -> list[int]:
        """Of each row's next token."""
        held = zip(self._place, self._length, strict=True)
        return [self._tokens(place) + length for place, length in held]

    def add(self, prefix: CachedPrefix) -> None:
        if prefix not in self._held:
            place = self._held.index(None) if None in self._held else len(self._held)
            self._held[place : place + 1] = [prefix]
            self._new.add(place)
        self._place.append(self._held.index(prefix))
        self._length.append(0)
        self._work = None

    def retire(self, row: int) -> None:
        last = len(self._place) - 1
        place = self._place[row]
        for kept in (self._place, self._length):
            kept[row] = kept[last]
            kept.pop()
        if row < last:
            for cache in self._own:
                cache[:, row, :, : self._length[row]] = cache[:, last, :, : self._length[row]]
        if place not in self._place:
            self._held[place] = None
            self._new.discard(place)
            while self._held and self._held[-1] is None:
                self._held.pop()
        self._work = None

    def begin(self) -> _Step:
        """A step in which every row grows by one token."""
        work = self._ready(self._longest_prompt(), _rounded(max(self._length) + 1))
        kv_heads, like = self._config.kv_heads, self._own[0]
        seen_own, seen_prompt = torch.tensor(self._length), torch.tensor([self._tokens(p) for p in self._place])
        unseen = torch.cat(
            (torch.arange(work.prompt) >= seen_prompt[:, None], torch.arange(work.own) > seen_own[:, None]), dim=1
        ).to(like.device)
        heads = torch.arange(2)[:, None] * like.shape[1] * kv_heads + torch.arange(kv_heads)
        written = (torch.arange(len(self))[:, None, None] * kv_heads + heads) * work.own + seen_own[:, None, None]
        mask = like.new_zeros(unseen.shape).masked_fill_(unseen, float("-inf"))[:, None, None]
        self._length = [length + 1 for length in self._length]
        return _Step(work, mask, written.flatten().to(like.device))

    def _ready(self, prompt: int, own: int) -> _Work:
        work = self._work
        if work is None or (work.prompt, work.own) != (prompt, own):
            self._own = _room(self._own, len(self), own)
            self._prompts = _room(self._prompts, len(self._held), prompt)
            self._fill()
            self._work = work = _Work(self._own, self._prompts, self._place, self._share)
        return work

    def attend(self, layer: int, step: _Step, q: Tensor, kv: Tensor) -> Tensor:
        """q [rows, heads, d], kv [rows, 2 × kv_heads, d] of the new tokens → [rows, heads × d]; remembers kv."""
        work, one, width = step.work, step.work.layers[layer], self._config.head_dim
        one.own[step.written] = kv.reshape(-1, width)
        queries = q.reshape(work.heads, self._share, width)
        work.queries.index_copy_(0, work.at, queries)
        torch.bmm(work.folded_queries, one.prompt_keys, out=work.folded_scores)
        work.scores_of_prompt.copy_(work.prompt_scores.index_select(0, work.at))
        torch.bmm(queries, one.keys, out=work.scores_of_own)
        torch.add(step.mask, work.by_row, alpha=width**-0.5, out=work.by_row)
        torch.softmax(work.scores, -1, out=work.looks)
        work.prompt_looks.index_copy_(0, work.at, work.looks_at_prompt)
        found = torch.bmm(work.folded_looks, one.prompt_values).view(work.queries.shape).index_select(0, work.at)
        return found.baddbmm_(work.looks_at_own, one.values).view(work.rows, -1)

    def _fill(self) -> None:
        for place in self._new:
            prefix = self._held[place]
            assert prefix is not None
            for layer, cache in enumerate(self._prompts):
                cache[:, place, :, : prefix.tokens] = prefix.kept[layer]
        self._new.clear()

    def _longest_prompt(self) -> int:
        return _rounded(max(prefix.tokens for prefix in self._held if prefix is not None))

    def _tokens(self, place: int) -> int:
        prefix = self._held[place]
        assert prefix is not None
        return prefix.tokens


def _layer(own: Tensor, prompts: Tensor, rows: int, held: int) -> _Layer:
    keys, values = own[:, :rows].flatten(1, 2)
    prompt_keys, prompt_values = prompts[:, :held].flatten(1, 2)
    flat = own.view(-1, own.shape[-1])
    return _Layer(flat, keys.transpose(1, 2), values, prompt_keys.transpose(1, 2), prompt_values)


def _on_grid(places: list[int], kv_heads: int, largest: int) -> list[int]:
    """`places`: of each row's prompt."""
    taken: Counter[int] = Counter()
    found = []
    for place in places:
        found += [head * largest + taken[place] for head in range(place * kv_heads, (place + 1) * kv_heads)]
        taken[place] += 1
    return found


def _rounded(tokens: int) -> int:
    return -(-tokens // _STEP) * _STEP


def _room(caches: list[Tensor], rows: int, tokens: int) -> list[Tensor]:
    """For at least so many rows, of exactly so many tokens; a layer is copied at a time. Zeros, not rubbish: what is
    masked is multiplied by 0, and 0 × NaN is NaN.
    """
    _, has_rows, kv_heads, has_tokens, width = caches[0].shape
    if rows <= has_rows and tokens == has_tokens:
        return caches
    kept = min(tokens, has_tokens)
    for layer, old in enumerate(caches):
        caches[layer] = old.new_zeros(2, max(rows, has_rows), kv_heads, tokens, width)
        caches[layer][:, :has_rows, :, :kept] = old[:, :, :, :kept]
    return caches
