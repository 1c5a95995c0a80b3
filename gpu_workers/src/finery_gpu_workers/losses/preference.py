"""Losses of preference pairs, on log-probs that are summed over each answer. Pure; gradients by autograd.

With c and r the policy's log-probs of the chosen and the rejected answer, c' and r' the reference's, n_c and n_r their
numbers of tokens, b = beta, s = label_smoothing, and the margin d = (c - c') - (r - r'):

    sigmoid   -(1 - s) log σ(b d) - s log σ(-b d)                     Rafailov et al. 2023, arXiv:2305.18290, eq. 7;
                                                                      s > 0: conservative (Mitchell 2023)
    robust    (-(1 - s) log σ(b d) + s log σ(-b d)) / (1 - 2 s)       Chowdhury et al. 2024, arXiv:2403.00409, eq. 11
    ipo       ((c - c') / n_c - (r - r') / n_r - 1 / (2 b))²          Azar et al. 2023, arXiv:2310.12036, eq. 17; per
                                                                      token, as its authors computed it
    hinge     max(0, 1 - b d)                                         Zhao et al. 2023, arXiv:2305.10425
    simpo     -log σ(b c / n_c - b r / n_r - margin)                  Meng et al. 2024, arXiv:2405.14734, eq. 6
    orpo      -c / n_c - b log σ(odds(c / n_c) - odds(r / n_r))       Hong et al. 2024, arXiv:2403.07691, eq. 6, with
                                                                      odds(x) = x - log(1 - exp x)
    apo_zero  (1 - σ(b (c - c'))) + σ(b (r - r'))                     D'Oosterlinck et al. 2024, arXiv:2408.06266, eq. 7
    apo_down  σ(b (c - c')) + 1 - σ(b d)                              eq. 8
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor

from finery.types.dpo import REFERENCE_FREE, DpoHyperparameters, PreferenceLoss, beta_of

_MOST = -1e-6
"""A mean log-prob counts as at most this much in odds, which are infinite for a certain answer."""


@dataclass(frozen=True)
class Pairs:
    """Log-probs of pairs, float32 [pairs] each."""

    chosen: Tensor
    """Of the policy, summed over the answer's scored tokens."""
    rejected: Tensor
    chosen_reference: Tensor | None
    """Of the starting point; None (both) for losses that do not look at it."""
    rejected_reference: Tensor | None
    chosen_tokens: Tensor
    """Scored tokens, at least 1."""
    rejected_tokens: Tensor


@dataclass(frozen=True)
class PreferenceTerms:
    """float32 [pairs] each. Only `losses` carries a gradient."""

    losses: Tensor
    """Numerators: divide their sum by the number of pairs of the whole update."""
    chosen_rewards: Tensor
    """beta × the log-ratio to the reference; beta × the mean log-prob for losses without one."""
    rejected_rewards: Tensor

    @property
    def margins(self) -> Tensor:
        return self.chosen_rewards - self.rejected_rewards

    @property
    def accuracies(self) -> Tensor:
        """1 where the chosen answer's reward is the higher one, 0.5 where they are equal (as before the first step)."""
        return (1 + self.margins.sign()) / 2


def preference_loss(pairs: Pairs, hyper: DpoHyperparameters) -> PreferenceTerms:
    """The formulas above. Raises ValueError on shapes, and on a reference that is missing or would not be looked at."""
    _check(pairs, hyper.loss)
    beta = beta_of(hyper)
    if pairs.chosen_reference is None or pairs.rejected_reference is None:
        chosen, rejected = pairs.chosen / pairs.chosen_tokens, pairs.rejected / pairs.rejected_tokens
    else:
        chosen, rejected = pairs.chosen - pairs.chosen_reference, pairs.rejected - pairs.rejected_reference
    losses = _FORMULAS[hyper.loss](chosen, rejected, pairs, hyper, beta)
    return PreferenceTerms(losses, beta * chosen.detach(), beta * rejected.detach())


def _check(pairs: Pairs, loss: PreferenceLoss) -> None:
    shape = pairs.chosen.shape
    references = (pairs.chosen_reference, pairs.rejected_reference)
    given = [one for one in references if one is not None]
    if loss in REFERENCE_FREE and given:
        raise ValueError(f"{loss}: expected no reference, as it would not be looked at")
    if loss not in REFERENCE_FREE and len(given) < 2:
        raise ValueError(f"{loss}: expected the reference's log-probs of both answers, found {len(given)}")
    parts = (pairs.rejected, *given, pairs.chosen_tokens, pairs.rejected_tokens)
    if pairs.chosen.ndim != 1 or any(part.shape != shape for part in parts):
        found = ", ".join(str(tuple(part.shape)) for part in (pairs.chosen, *parts))
        raise ValueError(f"expected vectors of one length, found {found}")
    if bool((pairs.chosen_tokens < 1).any()) or bool((pairs.rejected_tokens < 1).any()):
        raise ValueError("expected at least one scored token in every answer")


_Formula = Callable[[Tensor, Tensor, Pairs, DpoHyperparameters, float], Tensor]
"""(chosen, rejected): log-ratios to the reference, or mean log-probs where there is none."""


def _sigmoid(chosen: Tensor, rejected: Tensor, _: Pairs, hyper: DpoHyperparameters, beta: float) -> Tensor:
    margin, noise = beta * (chosen - rejected), hyper.label_smoothing
    return -(1 - noise) * F.logsigmoid(margin) - noise * F.logsigmoid(-margin)


def _robust(chosen: Tensor, rejected: Tensor, _: Pairs, hyper: DpoHyperparameters, beta: float) -> Tensor:
    margin, noise = beta * (chosen - rejected), hyper.label_smoothing
    return (-(1 - noise) * F.logsigmoid(margin) + noise * F.logsigmoid(-margin)) / (1 - 2 * noise)


def _ipo(chosen: Tensor, rejected: Tensor, pairs: Pairs, _: DpoHyperparameters, beta: float) -> Tensor:
    return (chosen / pairs.chosen_tokens - rejected / pairs.rejected_tokens - 1 / (2 * beta)).square()


def _hinge(chosen: Tensor, rejected: Tensor, _: Pairs, __: DpoHyperparameters, beta: float) -> Tensor:
    return torch.relu(1 - beta * (chosen - rejected))


def _simpo(chosen: Tensor, rejected: Tensor, _: Pairs, hyper: DpoHyperparameters, beta: float) -> Tensor:
    return -F.logsigmoid(beta * (chosen - rejected) - hyper.margin)


def _orpo(chosen: Tensor, rejected: Tensor, _: Pairs, __: DpoHyperparameters, beta: float) -> Tensor:
    return -chosen - beta * F.logsigmoid(_log_odds(chosen) - _log_odds(rejected))


def _log_odds(mean: Tensor) -> Tensor:
    bounded = mean.clamp(max=_MOST)
    return bounded - torch.log(-torch.expm1(bounded))


def _apo_zero(chosen: Tensor, rejected: Tensor, _: Pairs, __: DpoHyperparameters, beta: float) -> Tensor:
    return 1 - torch.sigmoid(beta * chosen) + torch.sigmoid(beta * rejected)


def _apo_down(chosen: Tensor, rejected: Tensor, _: Pairs, __: DpoHyperparameters, beta: float) -> Tensor:
    return torch.sigmoid(beta * chosen) + 1 - torch.sigmoid(beta * (chosen - rejected))


_FORMULAS: dict[PreferenceLoss, _Formula] = {
    "sigmoid": _sigmoid,
    "robust": _robust,
    "ipo": _ipo,
    "hinge": _hinge,
    "simpo": _simpo,
    "orpo": _orpo,
    "apo_zero": _apo_zero,
    "apo_down": _apo_down,
}
