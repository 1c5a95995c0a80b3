"""Decoding with our decoder: keys and values of all rows in one cache, which grows with the longest of them."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor

from finery_gpu_workers.models.attention import attend
from finery_gpu_workers.models.decoder import Block, Decoder
from finery_gpu_workers.models.kernels import rms_norm, rotate, swiglu
from finery_gpu_workers.models.rope import amplitude, inverse_frequencies, rotation
from finery_gpu_workers.rollout.linear import Linear

# Tokens that the cache is grown by at least, and the step in which the part of it that is looked at grows: kernels
# are made anew for every shape.
_GROWTH = 64
_STEP = 32
# Prompts that are read together, in tokens.
_READ_AT_ONCE = 2048


_Attention = Callable[[int, Tensor, Tensor, Tensor], Tensor]
"""(layer, q [T, heads, d], k and v [T, kv_heads, d]) → [T, heads × d]"""


@dataclass(frozen=True)
class CachedPrefix:
    keys: Tensor
    """[layers, kv_heads, prompt, head_dim]"""
    values: Tensor
    logits: Tensor


def bytes_per_token(model: Decoder) -> int:
    """Of the cache, for each row and token."""
    config = model.config
    return 2 * config.layers * config.kv_heads * config.head_dim * model.dtype.itemsize


class CachedDecoder:
    """The cache has a place for every row that there ever was at once, and for the tokens of the longest."""

    def __init__(self, model: Decoder) -> None:
        self._config = model.config
        self._model = model
        self._linear = {id(one): Linear.of(one, model.dtype) for one in model.projections()}
        self._frequencies = inverse_frequencies(model.config).to(model.device)
        self._amplitude = amplitude(model.config)
        self._lengths: list[int] = []
        shape = (0, model.config.kv_heads, 0, model.config.head_dim)
        self._keys = [model.embedding.new_zeros(shape) for _ in model.blocks]
        self._values = [model.embedding.new_zeros(shape) for _ in model.blocks]
        self.longest_row = model.config.longest_row

    @torch.no_grad()
    def read(self, prompts: Sequence[tuple[int, ...]]) -> list[CachedPrefix]:
        return [one for pack in _packs(prompts) for one in self._read(pack)]

    def _read(self, prompts: Sequence[tuple[int, ...]]) -> list[CachedPrefix]:
        device, lengths = self._model.device, tuple(map(len, prompts))
        tokens = torch.tensor([token for prompt in prompts for token in prompt], device=device)
        positions = torch.cat([torch.arange(length, device=device) for length in lengths])
        kept: list[tuple[Tensor, Tensor]] = []

        def attention(_: int, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
            kept.append((k, v))
            return attend(q, k, v, lengths)

        hidden = self._forward(tokens, positions, attention)
        ends = torch.tensor(lengths, device=device).cumsum(0)
        logits = self._model.logits(hidden[ends - 1])
        # [layers, T, kv_heads, d] → by prompt
        keys, values = (torch.stack(one).transpose(1, 2).split(lengths, dim=2) for one in zip(*kept, strict=True))
        return [CachedPrefix(k.clone(), v.clone(), one) for k, v, one in zip(keys, values, logits, strict=True)]

    @torch.no_grad()
    def add(self, prefix: CachedPrefix) -> None:
        row, length = len(self._lengths), prefix.keys.shape[2]
        self._make_room(row + 1, length + 1)
        for caches, parts in ((self._keys, prefix.keys), (self._values, prefix.values)):
            for cache, part in zip(caches, parts, strict=True):
                cache[row, :, :length] = part
        self._lengths.append(length)

    @torch.no_grad()
    def step(self, tokens: Sequence[int]) -> Tensor:
        count, device = len(self._lengths), self._model.device
        longest = max(self._lengths) + 1
        self._make_room(count, longest)
        seen = min(-(-longest // _STEP) * _STEP, self._keys[0].shape[2])
        positions = torch.tensor(self._lengths, device=device)
        rows, kv_heads, width = torch.arange(count, device=device), self._config.kv_heads, self._config.head_dim
        unseen = torch.arange(seen, device=device) > positions[:, None]
        mask = torch.zeros(count, 1, 1, seen, dtype=self._model.dtype, device=device)
        mask.masked_fill_(unseen[:, None, None], float("-inf"))
        share = self._config.heads // kv_heads
        mask = mask.expand(count, kv_heads, share, seen).reshape(count * kv_heads, share, seen)

        def attention(layer: int, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
            keys, values = self._keys[layer], self._values[layer]
            keys[rows, :, positions] = k
            values[rows, :, positions] = v
            keys, values = (x[:count, :, :seen].reshape(count * kv_heads, seen, width) for x in (keys, values))
            queries = q.reshape(count * kv_heads, share, width)
            scores = torch.baddbmm(mask, queries, keys.transpose(1, 2), alpha=width**-0.5)
            return torch.bmm(torch.softmax(scores, -1), values).view(count, -1)

        hidden = self._forward(torch.tensor(tokens, device=device), positions, attention)
        self._lengths = [length + 1 for length in self._lengths]
        return self._model.logits(hidden)

    @torch.no_grad()
    def retire(self, row: int) -> None:
        last = len(self._lengths) - 1
        length = self._lengths.pop()
        if row < last:
            self._lengths[row] = length
            for cache in (*self._keys, *self._values):
                cache[row, :, :length] = cache[last, :, :length]

    def _make_room(self, rows: int, tokens: int) -> None:
        """Zeros, not rubbish: what is masked is multiplied by 0, and 0 × NaN is NaN."""
        has_rows, _, has_tokens, _ = self._keys[0].shape
        if rows <= has_rows and tokens <= has_tokens:
            return
        if tokens > has_tokens:
            tokens = -(-max(tokens, has_tokens + has_tokens // 4) // _GROWTH) * _GROWTH
        shape = (max(rows, has_rows), self._config.kv_heads, max(tokens, has_tokens), self._config.head_dim)
        for caches in (self._keys, self._values):
            for layer, old in enumerate(caches):
                caches[layer] = old.new_zeros(shape)
                caches[layer][:has_rows, :, :has_tokens] = old

    def _forward(self, tokens: Tensor, positions: Tensor, attention: _Attention) -> Tensor:
        """As `Decoder.forward`, with another attention."""
        cos, sin = rotation(self._frequencies, positions, self._model.dtype, self._amplitude)
        x = F.embedding(tokens, self._model.embedding)
        for layer, block in enumerate(self._model.blocks):
            q, k, v = self._heads(block, self._normed(x, block.attention_norm), cos, sin)
            x = x + self._linear[id(block.o)](attention(layer, q, k, v))
            gate_up = self._linear[id(block.gate_up)](self._normed(x, block.mlp_norm))
            x = x + self._linear[id(block.down)](swiglu(gate_up))
        return self._normed(x, self._model.norm)

    def _heads(self, block: Block, x: Tensor, cos: Tensor, sin: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        heads, kv_heads = self._config.heads, self._config.kv_heads
        qkv = self._linear[id(block.qkv)](x).view(-1, heads + 2 * kv_heads, self._config.head_dim)
        qk, v = torch.split(qkv, [heads + kv_heads, kv_heads], dim=1)
        if block.q_norm is not None and block.k_norm is not None:
            q, k = torch.split(qk, [heads, kv_heads], dim=1)
            qk = torch.cat((self._normed(q, block.q_norm), self._normed(k, block.k_norm)), dim=1)
        q, k = torch.split(rotate(qk, cos, sin), [heads, kv_heads], dim=1)
        return q, k, v

    def _normed(self, x: Tensor, weight: Tensor) -> Tensor:
        return rms_norm(x, weight, self._config.norm_eps)


def _packs(prompts: Sequence[tuple[int, ...]]) -> list[list[tuple[int, ...]]]:
    packs: list[list[tuple[int, ...]]] = [[]]
    for prompt in prompts:
        if packs[-1] and sum(map(len, packs[-1])) + len(prompt) > _READ_AT_ONCE:
            packs.append([])
        packs[-1].append(prompt)
    return packs
