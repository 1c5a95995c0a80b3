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
class _Places:
    """Of rows on the grid; changes only when rows come and go."""

    prompts: int
    """Height of the grid, and its width:"""
    rows: int
    of_heads: Tensor
    """int64 [rows × kv_heads], into [prompts × kv_heads × rows]"""


@dataclass(frozen=True)
class _Step:
    """What all layers of a step share."""

    places: _Places
    prompt: int
    """Tokens of prompts that are looked at, and of the rows' own:"""
    own: int
    mask: Tensor
    """[rows, 1, 1, prompt + own], 0 or -inf"""
    written: Tensor
    """int64 [rows × 2 × kv_heads], where this step's keys and values go"""
    queries: Tensor
    """The grid, [prompts × kv_heads × rows, share × head_dim]; and that of what they look at:"""
    looks: Tensor


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
        self._places: _Places | None = None

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
        self._places = None

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
        self._places = None

    def begin(self) -> _Step:
        """A step in which every row grows by one token."""
        self._places = places = self._places or self._on_grid()
        prompt, own = self._longest_prompt(), _rounded(max(self._length) + 1)
        self._own = _room(self._own, len(self), own)
        self._prompts = _room(self._prompts, len(self._held), prompt)
        self._fill()
        kv_heads, width, like = self._config.kv_heads, self._config.head_dim, self._own[0]
        seen_own, seen_prompt = torch.tensor(self._length), torch.tensor([self._tokens(p) for p in self._place])
        unseen = torch.cat(
            (torch.arange(prompt) >= seen_prompt[:, None], torch.arange(own) > seen_own[:, None]), dim=1
        ).to(like.device)
        has_rows = like.shape[1]
        heads = torch.arange(2)[:, None] * has_rows * kv_heads + torch.arange(kv_heads)
        written = (torch.arange(len(self))[:, None, None] * kv_heads + heads) * own + seen_own[:, None, None]
        grid = places.prompts * kv_heads * places.rows
        mask = like.new_zeros(unseen.shape).masked_fill_(unseen, float("-inf"))[:, None, None]
        self._length = [length + 1 for length in self._length]
        return _Step(
            places,
            prompt,
            own,
            mask,
            written.flatten().to(like.device),
            like.new_zeros(grid, self._share * width),
            like.new_zeros(grid, self._share * prompt),
        )

    def attend(self, layer: int, step: _Step, q: Tensor, kv: Tensor) -> Tensor:
        """q [rows, heads, d], kv [rows, 2 × kv_heads, d] of the new tokens → [rows, heads × d]; remembers kv."""
        rows, kv_heads, width, share = len(self), self._config.kv_heads, self._config.head_dim, self._share
        own, prompts, at = self._own[layer], self._prompts[layer], step.places.of_heads
        own.view(-1, width)[step.written] = kv.reshape(-1, width)
        keys, values = own[:, :rows].flatten(1, 2)
        prompt_keys, prompt_values = prompts[:, : step.places.prompts].flatten(1, 2)
        queries = q.reshape(rows * kv_heads, share * width)
        step.queries.index_copy_(0, at, queries)
        scores = q.new_empty(rows * kv_heads, share, step.prompt + step.own)
        of_prompt = torch.bmm(step.queries.view(len(prompt_keys), -1, width), prompt_keys.transpose(1, 2))
        scores[:, :, : step.prompt] = of_prompt.view(-1, share, step.prompt).index_select(0, at)
        torch.bmm(queries.view(-1, share, width), keys.transpose(1, 2), out=scores[:, :, step.prompt :])
        shaped = scores.view(rows, kv_heads, share, -1)
        looks = torch.softmax(torch.add(step.mask, shaped, alpha=width**-0.5, out=shaped), -1).view(scores.shape)
        step.looks.index_copy_(0, at, looks[:, :, : step.prompt].reshape(rows * kv_heads, -1))
        found = torch.bmm(step.looks.view(len(prompt_keys), -1, step.prompt), prompt_values)
        output = found.view(-1, share, width).index_select(0, at)
        return output.baddbmm_(looks[:, :, step.prompt :], values).view(rows, -1)

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

    def _on_grid(self) -> _Places:
        largest = max(Counter(self._place).values())
        taken: Counter[int] = Counter()
        places = []
        for place in self._place:
            heads = range(place * self._config.kv_heads, (place + 1) * self._config.kv_heads)
            places += [head * largest + taken[place] for head in heads]
            taken[place] += 1
        return _Places(len(self._held), largest, torch.tensor(places, device=self._own[0].device))


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
