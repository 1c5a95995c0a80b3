"""Decoding with our decoder: as `Decoder.forward` computes, without what a backward pass would need."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import torch
import torch.nn.functional as F
from torch import Tensor

from finery_gpu_workers.models.attention import attend
from finery_gpu_workers.models.decoder import Block, Decoder
from finery_gpu_workers.models.rope import amplitude, inverse_frequencies, rotation
from finery_gpu_workers.rollout.kv_cache import CachedPrefix, KvCache
from finery_gpu_workers.rollout.linear import Linear, laid_out

# Prompts that are read together, in tokens.
_READ_AT_ONCE = 2048

_Attention = Callable[[int, Tensor, Tensor], Tensor]
"""(layer, q [T, heads, d], keys and values [T, 2 × kv_heads, d]) → [T, heads × d]"""


def bytes_per_token(model: Decoder) -> int:
    """Of the cache, for each token of a row, and of a prompt that rows share."""
    config = model.config
    return 2 * config.layers * config.kv_heads * config.head_dim * model.dtype.itemsize


class CachedDecoder:
    """The model's weights are read where they lie; adapters are cast to its dtype once, when this is made."""

    def __init__(self, model: Decoder) -> None:
        self._model = model
        self._config = model.config
        self._linear = [tuple(Linear.of(one, model.dtype) for one in block.projections()) for block in model.blocks]
        self._frequencies = inverse_frequencies(model.config).to(model.device)
        self._amplitude = amplitude(model.config)
        self._cache = KvCache(model.config, model.embedding.detach())
        self.longest_row = model.config.longest_row

    @torch.no_grad()  # not in inference mode: what `attend` remembers may meet a gradient later
    def read(self, prompts: Sequence[tuple[int, ...]]) -> list[CachedPrefix]:
        return [one for pack in _packs(prompts) for one in self._read(pack)]

    def _read(self, prompts: Sequence[tuple[int, ...]]) -> list[CachedPrefix]:
        device, lengths = self._model.device, tuple(map(len, prompts))
        tokens = torch.tensor([token for prompt in prompts for token in prompt], device=device)
        positions = torch.cat([torch.arange(length, device=device) for length in lengths])
        kept: list[Tensor] = []

        def attention(_: int, q: Tensor, kv: Tensor) -> Tensor:
            kept.append(kv.view(len(kv), 2, -1, self._config.head_dim))
            return attend(q, kept[-1][:, 0], kept[-1][:, 1], lengths)

        hidden = self._forward(tokens, positions, attention)
        logits = self._model.logits(hidden[torch.tensor(lengths, device=device).cumsum(0) - 1])
        # [layers, T, 2, kv_heads, d] → by prompt, tokens inside
        parts = torch.stack(kept).permute(0, 2, 3, 1, 4).split(lengths, dim=3)
        return [CachedPrefix(part.contiguous(), one) for part, one in zip(parts, logits, strict=True)]

    @torch.inference_mode()
    def add(self, prefix: CachedPrefix) -> None:
        self._cache.add(prefix)

    @torch.inference_mode()
    def step(self, tokens: Sequence[int]) -> Tensor:
        positions = torch.tensor(self._cache.positions(), device=self._model.device)
        step = self._cache.begin()
        hidden = self._forward(
            torch.tensor(tokens, device=self._model.device),
            positions,
            lambda layer, q, kv: self._cache.attend(layer, step, q, kv),
        )
        return self._model.logits(hidden)

    @torch.inference_mode()
    def retire(self, row: int) -> None:
        self._cache.retire(row)

    def memory(self) -> int:
        """Bytes of the cache."""
        return self._cache.memory()

    def _forward(self, tokens: Tensor, positions: Tensor, attention: _Attention) -> Tensor:
        cos, sin = rotation(self._frequencies, positions, self._model.dtype, self._amplitude)
        sin[..., : self._config.head_dim // 2].neg_()
        x = laid_out(F.embedding(tokens, self._model.embedding))
        for layer, block in enumerate(self._model.blocks):
            qkv, o, gate_up, down = self._linear[layer]
            q, kv = self._heads(block, qkv(self._normed(x, block.attention_norm)), cos, sin)
            o.onto(x, attention(layer, q, kv))
            gate, up = gate_up(self._normed(x, block.mlp_norm)).chunk(2, dim=-1)
            down.onto(x, F.silu(gate).mul_(up))
        return self._normed(x, self._model.norm)

    def _heads(self, block: Block, qkv: Tensor, cos: Tensor, sin: Tensor) -> tuple[Tensor, Tensor]:
        """Queries and keys are normed and turned where they lie."""
        heads, kv_heads, width = self._config.heads, self._config.kv_heads, self._config.head_dim
        qkv = qkv.reshape(-1, heads + 2 * kv_heads, width)
        q, kv = qkv.split([heads, 2 * kv_heads], dim=1)
        if block.q_norm is not None and block.k_norm is not None:
            q.copy_(self._normed(q, block.q_norm))
            kv[:, :kv_heads] = self._normed(kv[:, :kv_heads], block.k_norm)
        qk = qkv[:, : heads + kv_heads]
        torch.addcmul(qk * cos, qk.roll(width // 2, -1), sin, out=qk)
        return q, kv

    def _normed(self, x: Tensor, weight: Tensor) -> Tensor:
        wide = x.float()
        scale = wide.square().mean(-1, keepdim=True).add_(self._config.norm_eps).rsqrt_()
        return (wide * scale).to(x.dtype).mul_(weight)


def _packs(prompts: Sequence[tuple[int, ...]]) -> list[list[tuple[int, ...]]]:
    packs: list[list[tuple[int, ...]]] = [[]]
    for prompt in prompts:
        if packs[-1] and sum(map(len, packs[-1])) + len(prompt) > _READ_AT_ONCE:
            packs.append([])
        packs[-1].append(prompt)
    return packs
