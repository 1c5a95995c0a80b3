"""The updates of a step: log-probs of the policy and the reference, the loss, the optimizer."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, field

import torch
from torch import Tensor

from finery.types.rl import RlHyperparameters
from finery.types.rl_algorithms import ALGORITHMS
from finery_gpu_workers.learner import Learner
from finery_gpu_workers.losses.advantages import check_joined
from finery_gpu_workers.losses.kl import kl_estimate, kl_reward
from finery_gpu_workers.losses.policy import Counts, importance_weights, policy_terms, token_weights
from finery_gpu_workers.methods.rl_sampling import Rollout
from finery_gpu_workers.methods.rl_terms import UpdateTerms, compare, micro_batches, packed, update_terms

Key = tuple[int, int]
"""(group, sample)"""


@dataclass
class Sums:
    """Of the trained tokens of a step; means are made of them at its end."""

    tokens: int = 0
    ratio: float = 0.0
    clipped: int = 0
    importance: float = 0.0
    gap: float = 0.0
    log_prob: float = 0.0
    kl: float = 0.0

    def means(self, *, reference: bool) -> dict[str, float]:
        """By the names of metrics; nothing where nothing was trained."""
        if not self.tokens:
            return {}
        sums = {
            "ratio_mean": self.ratio,
            "clip_fraction": self.clipped,
            "importance_mean": self.importance,
            "sampler_gap": self.gap,
            "entropy": -self.log_prob,
        }
        return {name: total / self.tokens for name, total in (sums | ({"kl": self.kl} if reference else {})).items()}


@dataclass
class Updated:
    """What the updates of one step did."""

    updates: int = 0
    """Optimizer steps."""
    loss: float = 0.0
    """Mean over them."""
    grad_norm: float = 0.0
    """Of the last one, before clipping."""
    finite: bool = True
    sums: Sums = field(default_factory=Sums)


@dataclass
class Updater:
    learner: Learner
    hyper: RlHyperparameters
    """With nothing left open."""
    micro_batch_tokens: int
    in_learner: Callable[[], AbstractContextManager[None]] = nullcontext

    @property
    def uses_reference(self) -> bool:
        return self.hyper.kl_coefficient > 0

    def run(self, rollouts: Sequence[Rollout], learning_rate: Callable[[int], float]) -> Updated:
        """All updates of a step over its kept groups; `learning_rate` is that of update 0, 1, …

        Writes what was found into the rollouts. One update that is not finite ends them.
        """
        if self.uses_reference and self.hyper.kl_placement == "reward":
            self._charge([one for one in rollouts if one.reward is not None])
        compare(rollouts, self.hyper)
        plan, done = update_terms(rollouts, self.hyper), Updated()
        old, reference = self._fixed(plan)
        for number, update in enumerate(plan):
            if update.members:
                self._update(update, old, reference, learning_rate(number), done)
            if not done.finite:
                break
        done.loss /= max(1, done.updates)
        if self.uses_reference and self.hyper.kl_placement == "reward":
            trained = [one for update in plan for one in update.members if one.trained]
            done.sums.kl = sum(-one.parts["kl"] / self.hyper.kl_coefficient for one in trained)
        return done

    def _pulls(self, update: UpdateTerms) -> bool:
        """Before the first optimizer step the policy is the reference, whose divergence from itself has no gradient."""
        in_loss = self.uses_reference and self.hyper.kl_placement == "loss"
        return update.pulls(divergence=in_loss and self.learner.version > 0)

    def _fixed(self, plan: Sequence[UpdateTerms]) -> tuple[dict[Key, Tensor], dict[Key, Tensor]]:
        """What no update of a step moves: log-probs of the policy before the first one, and of the reference.

        Each update has the micro-batches that it will have: so the first one's ratios are 1 to the last bit.
        """
        members = [update.members for update in plan]
        old = self._log_probs(*members) if self.hyper.updates_per_step > 1 else {}
        reference = self._reference(*members) if self.uses_reference and self.hyper.kl_placement == "loss" else {}
        return old, reference

    def _update(
        self, update: UpdateTerms, old: dict[Key, Tensor], reference: dict[Key, Tensor], rate: float, done: Updated
    ) -> None:
        """Where nothing pulls, the members are scored, and the optimizer has nothing to do."""
        before, wanted, pulls = done.sums.tokens, sum(len(one.tokens) for one in update.members), self._pulls(update)
        for micro in self._micro_batches(update.members):
            batch, loss = packed(micro), _Loss(self.hyper, update.counts, micro, old, reference, done.sums)
            with self.in_learner():
                if pulls:
                    self.learner.forward_backward_with(batch, loss, self.hyper.temperature)
                else:
                    loss(self.learner.log_probs(batch, self.hyper.temperature))
            done.loss += loss.value
            done.finite &= math.isfinite(loss.value)
        if (found := done.sums.tokens - before) != wanted:
            raise RuntimeError(f"trained tokens of an update: expected {wanted}, found {found}")
        if pulls:
            with self.in_learner():
                stats = self.learner.optim_step(rate)
            done.updates += 1
            done.grad_norm, done.finite = stats.grad_norm, stats.finite
        for one in update.members:
            one.trained = done.finite

    def _micro_batches(self, rollouts: Sequence[Rollout]) -> list[list[Rollout]]:
        shared = self.learner.model.shares_prefixes
        return micro_batches(rollouts, self.micro_batch_tokens, shared_prompts=shared)

    def _charge(self, graded: Sequence[Rollout]) -> None:
        """Takes the divergence off rewards, as a part of them."""
        policy, reference = self._log_probs(graded), self._reference(graded)
        for one in graded:
            key, lengths = (one.group, one.sample), [len(one.tokens)]
            (found,) = kl_reward(policy[key], reference[key], self.hyper.kl_estimator, lengths)
            one.parts["kl"] = -self.hyper.kl_coefficient * found

    def _reference(self, *updates: Sequence[Rollout]) -> dict[Key, Tensor]:
        if not any(updates):
            return {}
        with self.learner.reference():
            return self._log_probs(*updates)

    def _log_probs(self, *updates: Sequence[Rollout]) -> dict[Key, Tensor]:
        """Of every rollout's tokens, in the micro-batches that these updates have."""
        found: list[Tensor] = []
        for micro in (micro for rollouts in updates for micro in self._micro_batches(rollouts)):
            batch = packed(micro)
            with self.in_learner():
                whole = self.learner.log_probs(batch, self.hyper.temperature)
            found += whole.split([len(one.tokens) for one in micro])
        keys = [(one.group, one.sample) for rollouts in updates for one in rollouts]
        check_joined(keys, log_probs=found)
        return dict(zip(keys, found, strict=True))


class _Loss:
    """The loss of one micro-batch: a function of its log-probs. Adds up what metrics are made of."""

    def __init__(
        self,
        hyper: RlHyperparameters,
        counts: Counts,
        rollouts: Sequence[Rollout],
        old: dict[Key, Tensor],
        reference: dict[Key, Tensor],
        sums: Sums,
    ) -> None:
        assert hyper.loss_normalization is not None
        keys = [(one.group, one.sample) for one in rollouts]
        self._hyper = hyper
        self._sums = sums
        self._lengths = [len(one.tokens) for one in rollouts]
        self._weights = token_weights(self._lengths, hyper.loss_normalization, counts)
        self._old = torch.cat([old[key] for key in keys]) if old else None
        self._reference = torch.cat([reference[key] for key in keys]) if reference else None
        self._sampled = torch.tensor([value for one in rollouts for value in _sampled(one)])
        values = torch.tensor([one.advantage for one in rollouts])
        self._advantages = values.repeat_interleave(torch.tensor(self._lengths))
        self.value = math.nan

    def __call__(self, log_probs: Tensor) -> Tensor:
        hyper, device = self._hyper, log_probs.device
        assert hyper.clip_low is not None
        assert hyper.clip_high is not None
        # With one update the policy is still the one that sampled: every ratio is 1.
        old = log_probs.detach() if self._old is None else self._old.to(device)
        sampled = self._sampled.to(device)
        terms = policy_terms(
            log_probs,
            old,
            self._advantages.to(device),
            self._lengths,
            ratio=ALGORITHMS[hyper.algorithm].ratio,
            clip_low=hyper.clip_low,
            clip_high=hyper.clip_high,
        )
        importance = importance_weights(old, sampled, hyper.importance_cap)
        losses = importance * terms.losses
        if self._reference is not None:
            kl = kl_estimate(log_probs, self._reference.to(device), hyper.kl_estimator)
            losses = losses + hyper.kl_coefficient * kl
            self._sums.kl += float(kl.detach().sum())
        sums = self._sums
        sums.tokens += len(log_probs)
        sums.ratio += float(terms.ratios.sum())
        sums.clipped += int(terms.clipped.sum())
        sums.importance += float(importance.sum())
        sums.gap += float((old - sampled).abs().sum())
        sums.log_prob += float(log_probs.detach().sum())
        loss = (self._weights.to(device) * losses).sum()
        self.value = float(loss.detach())
        return loss.float()


def _sampled(one: Rollout) -> list[float]:
    """The sampler's log-probs."""
    assert one.completion is not None
    if len(one.completion.log_probs) != len(one.tokens):
        raise RuntimeError(f"expected a log-prob for each of {len(one.tokens)} tokens, found others")
    return one.completion.log_probs
