"""From hidden states to losses: logits exist for one chunk of positions at a time, and are computed once if they fit.

The head is apart from the rest of the graph: what a loss says of hidden states is handed to autograd as a gradient.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass

import torch
from torch import Tensor

from finery_gpu_workers.losses.cross_entropy import cross_entropy
from finery_gpu_workers.losses.log_probs import token_log_probs
from finery_gpu_workers.models.interface import Model

# Logits are computed for this many numbers at a time: 64 MB in float32, of which the loss needs three.
_LOGITS_AT_ONCE = 2**24
# Bytes of softmaxes that are kept between the two halves of `backward_from_log_probs`; the rest is computed again.
_KEPT_BYTES = 2**28

Loss = Callable[[Tensor], Tensor]
"""log-probs float32 [scored] on the model's device → float32 scalar, already divided by its global denominators."""


@dataclass(frozen=True)
class LossSum:
    loss_sum: float
    """Weighted sum over the batch, not divided by anything."""
    tokens: int
    """Positions with weight > 0."""


def likelihood(
    model: Model, hidden: Tensor, targets: Tensor, weights: Tensor, gradient: Tensor | None = None, denominator: int = 1
) -> LossSum:
    """Cross-entropy of [N, hidden]; the gradient of loss / denominator with respect to `hidden` goes to `gradient`."""
    loss_sum, tokens = 0.0, 0
    for part in _chunks(model, len(hidden)):
        leaf = hidden[part].requires_grad_(gradient is not None)
        loss = cross_entropy(model.logits(leaf), targets[part], weights[part])
        if gradient is not None:
            (loss.numerator / denominator).backward()
            assert leaf.grad is not None
            gradient[part] = leaf.grad
        loss_sum += float(loss.numerator.detach())
        tokens += loss.tokens
    return LossSum(loss_sum, tokens)


@torch.no_grad()
def log_probs(model: Model, hidden: Tensor, targets: Tensor, temperature: float) -> Tensor:
    """[N, hidden], [N] → float32 [N]"""
    chunks = _chunks(model, len(hidden))
    return torch.cat([token_log_probs(model.logits(hidden[part]), targets[part], temperature) for part in chunks])


def backward_from_log_probs(
    model: Model, hidden: Tensor, targets: Tensor, loss: Loss, temperature: float
) -> tuple[Tensor, float, Tensor]:
    """(log-probs, the loss's value, its gradient with respect to `hidden`, which is detached).

    First all log-probs, of which the loss is a function; then, chunk by chunk, what its gradient says of each.
    """
    parts, kept = list(_chunks(model, len(hidden))), _KEPT_BYTES // (model.vocab * hidden.element_size())

    def score(part: slice) -> tuple[Tensor, Tensor]:
        leaf = hidden[part].requires_grad_(torch.is_grad_enabled())
        return leaf, token_log_probs(model.logits(leaf), targets[part], temperature)

    scored = []
    for part in parts:
        with torch.set_grad_enabled(part.stop <= kept):
            scored.append(score(part))
    whole = torch.cat([found.detach() for _, found in scored]).requires_grad_()
    value = loss(whole)
    (upstream,) = torch.autograd.grad(value, whole)
    gradient = torch.empty_like(hidden)
    for number, part in enumerate(parts):
        leaf, found = scored[number] if part.stop <= kept else score(part)
        found.backward(upstream[part])
        assert leaf.grad is not None
        gradient[part] = leaf.grad
    return whole.detach(), float(value.detach()), gradient


def _chunks(model: Model, count: int) -> Iterator[slice]:
    """Positions whose logits are computed at once."""
    size = max(1, _LOGITS_AT_ONCE // model.vocab)
    for start in range(0, count, size):
        yield slice(start, min(start + size, count))
