"""Log-probs of given tokens: what every loss on policies is a function of."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable

# Numbers that are scaled together on a CPU: the wide product stays in a core's cache.
_AT_ONCE = 2**18


def token_log_probs(logits: Tensor, targets: Tensor, temperature: float = 1.0) -> Tensor:
    """log softmax(logits[n] / temperature)[targets[n]], float32 [N]; float64 where the logits are.

    logits [N, V] of any float dtype, targets int64 [N]. Raises ValueError on other shapes, or a temperature of 0.
    """
    if logits.ndim != 2 or targets.shape != logits.shape[:1] or not temperature > 0:
        found = f"{tuple(logits.shape)}, {tuple(targets.shape)}, {temperature}"
        raise ValueError(f"expected logits [N, V], targets [N] and a temperature above 0, found {found}")
    return _TokenLogProbs.apply(logits, targets, temperature)  # type: ignore[no-any-return, no-untyped-call]


class _TokenLogProbs(torch.autograd.Function):
    """With p = softmax(logits / T): d log p[target] / d logits = (onehot(target) - p) / T.

    p - onehot is saved, rounded to the dtype of the logits after the subtraction, as in cross_entropy.py.
    """

    @staticmethod
    def forward(ctx: Any, logits: Tensor, targets: Tensor, temperature: float) -> Tensor:
        wide = logits.to(torch.promote_types(logits.dtype, torch.float32), copy=True)
        if temperature != 1.0:
            wide.div_(temperature)
        picked, highest = wide.gather(1, targets[:, None])[:, 0], wide.amax(-1)
        chances = torch.softmax(wide, dim=-1, out=wide)
        # The greatest p is at least 1 / V, so its logarithm is finite: log sum exp = highest - log p[highest].
        log_probs = picked - highest + chances.amax(-1).log()
        if ctx.needs_input_grad[0]:
            chosen = chances.gather(1, targets[:, None]) - 1
            ctx.save_for_backward(chances.scatter_(1, targets[:, None], chosen).to(logits.dtype))
            ctx.temperature = temperature
        return log_probs

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, upstream: Tensor) -> tuple[Tensor, None, None]:
        (excess,) = ctx.saved_tensors
        gradient, scale = torch.empty_like(excess), (-upstream / ctx.temperature)[:, None]
        rows = max(1, _AT_ONCE // excess.shape[1]) if excess.device.type == "cpu" else len(excess)
        for start in range(0, len(excess), max(rows, 1)):
            part = slice(start, start + rows)
            # In float32 until the product is rounded: a factor rounded first would scale a whole row.
            gradient[part] = excess[part] * scale[part]
        return gradient, None, None
