"""The decoder of the Llama shape, over packed rows. Frozen base weights; adapters hook into its projections."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Protocol

import torch
import torch.nn.functional as F
from torch import Tensor

from finery_gpu_workers.errors import WorkerError
from finery_gpu_workers.models.attention import attend
from finery_gpu_workers.models.config import DecoderConfig
from finery_gpu_workers.models.kernels import embed, rms_norm, rotate, swiglu
from finery_gpu_workers.models.rope import amplitude, inverse_frequencies, rotation


class Delta(Protocol):
    """What an adapter adds to a linear layer."""

    def __call__(self, y: Tensor, x: Tensor) -> Tensor:
        """The layer's output, its input → what the layer answers instead; may overwrite the output."""

    def linear(self, x: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
        """The same of a layer whose weight is frozen, in one pass."""


@dataclass
class Projection:
    """Linear layers that read the same input, stacked into one matrix."""

    weight: Tensor
    """[sum of sizes, inputs]"""
    names: tuple[str, ...]
    """The layers' module names in transformers, as in `model.layers.0.self_attn.q_proj`."""
    sizes: tuple[int, ...]
    """Outputs of each."""
    bias: Tensor | None = None
    """[sum of sizes]"""
    delta: Delta | None = None

    def named_weights(self) -> Iterator[tuple[str, Tensor]]:
        yield from zip((f"{name}.weight" for name in self.names), self.weight.split(self.sizes), strict=True)
        if self.bias is not None:
            yield from zip((f"{name}.bias" for name in self.names), self.bias.split(self.sizes), strict=True)

    def __call__(self, x: Tensor) -> Tensor:
        return (F.linear if self.delta is None else self.delta.linear)(x, self.weight, self.bias)


@dataclass(frozen=True)
class Block:
    attention_norm: Tensor
    qkv: Projection
    o: Projection
    mlp_norm: Tensor
    gate_up: Projection
    down: Projection
    q_norm: Tensor | None = None
    """[head_dim]: RMS norm of every query head before the rotation (Qwen3); `k_norm` alike."""
    k_norm: Tensor | None = None

    def projections(self) -> Iterator[Projection]:
        yield from (self.qkv, self.o, self.gate_up, self.down)


@dataclass(eq=False)
class Decoder:
    config: DecoderConfig
    embedding: Tensor
    """[vocab, hidden]"""
    blocks: tuple[Block, ...]
    norm: Tensor
    head: Tensor
    """[vocab, hidden]; the embedding itself when tied"""

    def named_weights(self) -> Iterator[tuple[str, Tensor]]:
        """Every weight under its name in transformers, stacked ones as views; a tied head has no name of its own."""
        yield "model.embed_tokens.weight", self.embedding
        for number, block in enumerate(self.blocks):
            prefix = f"model.layers.{number}"
            yield f"{prefix}.input_layernorm.weight", block.attention_norm
            yield f"{prefix}.post_attention_layernorm.weight", block.mlp_norm
            for head, norm in (("q", block.q_norm), ("k", block.k_norm)):
                if norm is not None:
                    yield f"{prefix}.self_attn.{head}_norm.weight", norm
            for projection in block.projections():
                yield from projection.named_weights()
        yield "model.norm.weight", self.norm
        if self.head is not self.embedding:
            yield "lm_head.weight", self.head

    @property
    def engine(self) -> str:
        return "finery"

    @property
    def engine_reason(self) -> str:
        return ""

    def stored_name(self, name: str) -> str:
        return name

    @property
    def vocab(self) -> int:
        return self.embedding.shape[0]

    @property
    def tied(self) -> bool:
        return self.head is self.embedding

    def token_matrices(self) -> tuple[Tensor, ...]:
        return (self.embedding,) if self.tied else (self.embedding, self.head)

    def untie(self) -> None:
        """The output matrix becomes one of its own, equal to the embedding for now."""
        if self.tied:
            self.head = self.embedding.detach().clone()

    @property
    def device(self) -> torch.device:
        return self.embedding.device

    @property
    def dtype(self) -> torch.dtype:
        return self.embedding.dtype

    def projections(self) -> Iterator[Projection]:
        for block in self.blocks:
            yield from block.projections()

    @property
    def shares_prefixes(self) -> bool:
        return True

    def forward(
        self, tokens: Tensor, positions: Tensor, lengths: tuple[int, ...], parents: tuple[int, ...] = ()
    ) -> Tensor:
        """int64 [T], int64 [T], rows' lengths and parents → last hidden states after the final norm, [T, hidden]."""
        self._check_lengths(lengths, parents)
        frequencies = inverse_frequencies(self.config).to(self.device)
        cos, sin = rotation(frequencies, positions, self.dtype, amplitude(self.config))
        x, rows = embed(tokens, self.embedding), (lengths, parents)
        for block in self.blocks:
            x = x + self._attention(block, self._normed(x, block.attention_norm), cos, sin, rows)
            x = x + self._mlp(block, self._normed(x, block.mlp_norm))
        return self._normed(x, self.norm)

    def logits(self, hidden: Tensor) -> Tensor:
        """[N, hidden] → [N, vocab]; call it for positions with loss only."""
        return F.linear(hidden, self.head)

    def _check_lengths(self, lengths: tuple[int, ...], parents: tuple[int, ...]) -> None:
        """What a row sees is its parent and itself."""
        longest = self.config.longest_row
        found = max(
            n + (lengths[p] if p >= 0 else 0) for n, p in zip(lengths, parents or (-1,) * len(lengths), strict=True)
        )
        if longest is not None and found > longest:
            message = f"expected rows of at most {longest} tokens, which this model sees whole, found {found}"
            raise WorkerError("row_too_long_for_model", f"{message}; lower hyperparameters.max_length")

    def _attention(
        self, block: Block, x: Tensor, cos: Tensor, sin: Tensor, rows: tuple[tuple[int, ...], tuple[int, ...]]
    ) -> Tensor:
        heads, kv_heads = self.config.heads, self.config.kv_heads
        qkv = block.qkv(x).view(-1, heads + 2 * kv_heads, self.config.head_dim)
        qk, v = torch.split(qkv, [heads + kv_heads, kv_heads], dim=1)
        if block.q_norm is not None and block.k_norm is not None:
            q, k = torch.split(qk, [heads, kv_heads], dim=1)
            qk = torch.cat((self._normed(q, block.q_norm), self._normed(k, block.k_norm)), dim=1)
        q, k = torch.split(rotate(qk, cos, sin), [heads, kv_heads], dim=1)
        return block.o(attend(q, k, v, *rows))

    def _mlp(self, block: Block, x: Tensor) -> Tensor:
        return block.down(swiglu(block.gate_up(x)))

    def _normed(self, x: Tensor, weight: Tensor) -> Tensor:
        return rms_norm(x, weight, self.config.norm_eps)
