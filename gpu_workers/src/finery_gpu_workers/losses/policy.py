"""Policy-gradient losses over sampled tokens: pure, shape-checked, one term per token.

Sequences lie end to end, T tokens in all. The loss of an update is Σ weight × term, with weights from `token_weights`:
they hold the denominators, which are counts over the whole update, so that micro-batches and ranks just add up.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

import torch
from torch import Tensor

Ratio = Literal["token", "sequence", "detached"]
Normalization = Literal["sequence", "token", "constant"]


@dataclass(frozen=True)
class Counts:
    """Of a whole update: of the sequences that have a part in its loss, and no others."""

    sequences: int
    tokens: int
    longest: int
    """Most tokens that a sequence could have had: `max_new_tokens`."""


@dataclass(frozen=True)
class PolicyTerms:
    losses: Tensor
    """[T], differentiable."""
    ratios: Tensor
    """[T], detached: the policy's probability over that of the policy which is improved."""
    clipped: Tensor
    """bool [T]: the ratio was outside its bounds on the side where that holds the gradient back."""


def token_weights(lengths: list[int], normalization: Normalization, counts: Counts) -> Tensor:
    """What each token's term counts, float64 [sum of lengths], for N sequences and M tokens in the update:

        sequence   1 / (N × tokens of its sequence)    mean over sequences of their means (GRPO, arXiv:2402.03300)
        token      1 / M                               mean over tokens (DAPO, arXiv:2503.14476)
        constant   1 / (N × longest)                   no answer's tokens count less for its length (Dr. GRPO,
                                                       arXiv:2503.20783)

    `lengths` may be those of a part of the update only. Raises ValueError where they are more than it has.
    """
    if min(lengths, default=1) < 1 or len(lengths) > counts.sequences or sum(lengths) > counts.tokens:
        found = f"{len(lengths)} of {sum(lengths)} tokens"
        raise ValueError(f"expected up to {counts.sequences} sequences of {counts.tokens} tokens in all, found {found}")
    sizes = torch.tensor(lengths, dtype=torch.int64)
    if normalization == "sequence":
        each = 1.0 / (counts.sequences * sizes.double())
    elif normalization == "token":
        each = torch.full((len(lengths),), 1.0 / counts.tokens, dtype=torch.float64)
    else:
        each = torch.full((len(lengths),), 1.0 / (counts.sequences * counts.longest), dtype=torch.float64)
    return each.repeat_interleave(sizes)


def policy_terms(
    log_probs: Tensor,
    old: Tensor,
    advantages: Tensor,
    lengths: list[int],
    *,
    ratio: Ratio = "token",
    clip_low: float,
    clip_high: float,
) -> PolicyTerms:
    """One loss term per token; A its advantage, ρ = exp(log_probs - old), clip(x) to [1 - clip_low, 1 + clip_high]:

        token      -min(ρ A, clip(ρ) A)          PPO (Schulman et al. 2017, arXiv:1707.06347), GRPO; with clip_high
                                                 above clip_low DAPO's clip-higher
        sequence   the same with s = exp(mean of log_probs - old over its sequence) in place of ρ; the gradient goes
                   through s to all tokens       GSPO (Zheng et al. 2025, arXiv:2507.18071)
        detached   -stop_gradient(clip(ρ)) A log_probs: no token loses its gradient, its weight is bounded
                                                 CISPO (MiniMax 2025, arXiv:2506.13585)

    At old = log_probs all have the gradient -A ∇ log_probs (sequence: -A times its sequence's mean of them).
    log_probs float [T] with gradient; old, advantages [T] without; lengths [sequences]. Raises ValueError on others.
    """
    shapes = [tuple(one.shape) for one in (log_probs, old, advantages)]
    if log_probs.ndim != 1 or len(set(shapes)) != 1 or sum(lengths) != len(log_probs):
        found = f"{shapes[0]}, {shapes[1]}, {shapes[2]} and lengths of {sum(lengths)} tokens"
        raise ValueError(f"expected log_probs, old and advantages [T] and lengths that sum to T, found {found}")
    apart = log_probs - old.detach()
    if ratio == "sequence":
        apart = _sequence_means(apart, lengths)
    ratios = apart.exp()
    bounded = ratios.clamp(1.0 - clip_low, 1.0 + clip_high)
    if ratio == "detached":
        losses = -bounded.detach() * advantages * log_probs
        return PolicyTerms(losses, ratios.detach(), (ratios != bounded).detach())
    free, held = ratios * advantages, bounded * advantages
    return PolicyTerms(-torch.minimum(free, held), ratios.detach(), (held < free).detach())


def _sequence_means(values: Tensor, lengths: list[int]) -> Tensor:
    """Every token gets the mean of its sequence."""
    sizes = torch.tensor(lengths, device=values.device)
    means = torch.stack([part.mean() for part in values.split(lengths)])
    return means.repeat_interleave(sizes)


def importance_weights(learner: Tensor, sampler: Tensor, cap: float | None) -> Tensor:
    """min(cap, learner's probability / sampler's) of each token, detached, [T]; 1 where `cap` is None.

    Truncated importance sampling (Yao et al. 2025, "Your efficient RL framework secretly brings you off-policy RL
    training"): the tokens were drawn from the sampler's distribution, which differs from the learner's by rounding,
    and by what `top_p` and the like cut off. A token's policy term is multiplied by it.

    learner, sampler float [T]: log-probs of the same weights. Raises ValueError on other shapes.
    """
    if learner.ndim != 1 or learner.shape != sampler.shape:
        found = f"{tuple(learner.shape)} and {tuple(sampler.shape)}"
        raise ValueError(f"expected log-probs of one shape [T], found {found}")
    if cap is None:
        return torch.ones_like(learner)
    return (learner - sampler).detach().exp().clamp(max=cap)
