"""Decoding of models that transformers computes: every row has a cache of its own, as the model itself makes it."""

from __future__ import annotations

import copy
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from finery_gpu_workers.models.foreign import ForeignModel, longest_row


@dataclass(frozen=True)
class ForeignPrefix:
    cache: Any
    logits: Tensor


class ForeignBackend:
    """Slower than ours, but right: what a kind of layer keeps of the past is the model's own affair."""

    def __init__(self, model: ForeignModel) -> None:
        self._net = model.net
        self._device = model.device
        self._caches: list[Any] = []
        self.longest_row = longest_row(model.net)

    def read(self, prompts: Sequence[tuple[int, ...]]) -> list[ForeignPrefix]:
        return [ForeignPrefix(*self._forward(prompt, None)) for prompt in prompts]

    def add(self, prefix: ForeignPrefix) -> None:
        self._caches.append(copy.deepcopy(prefix.cache))

    def step(self, tokens: Sequence[int]) -> Tensor:
        rows = zip(tokens, self._caches, strict=True)
        return torch.stack([self._forward((token,), cache)[1] for token, cache in rows])

    def retire(self, row: int) -> None:
        last = self._caches.pop()
        if row < len(self._caches):
            self._caches[row] = last

    @torch.no_grad()
    def _forward(self, tokens: Sequence[int], cache: Any) -> tuple[Any, Tensor]:
        """Not in inference mode: what a module remembers of this call may meet a gradient later."""
        ids = torch.tensor([tokens], device=self._device)
        found = self._net(input_ids=ids, cache=cache, use_cache=True, logits_to_keep=1)
        if found.cache is None:
            raise RuntimeError(f"{type(self._net).__name__}: expected a cache of keys and values, found none")
        return found.cache, found.logits[0, -1]
