"""Learning from preferences: the loop of `passes.py` with a loss of pairs.

    pairs       prompt, chosen and rejected answer (data/preference.py); the prompt is computed once for both
    reference   log-probs of the starting point, for all pairs, before the first step (dpo_reference.py): the base, or
                the checkpoint that the job goes on from. None for losses that do not look at it.
    loss        sum over pairs of the preference loss (losses/preference.py) / pairs of the whole update
                + sft_weight × - sum over the chosen answers of log p / their trained tokens in the whole update
    evaluation  the same over the whole validation set
    usage       train.dpo, eval.dpo: trained tokens of both answers; the reference is not billed

Metrics of steps and evaluations, means over pairs unless said otherwise:

    loss                              as above
    chosen_reward, rejected_reward    beta × log-ratio to the reference, or beta × mean log-prob where there is none
    margin                            chosen_reward - rejected_reward
    accuracy                          share of pairs with a margin above 0; a margin of 0 counts half, so that it is 0.5
                                      before the first step
    chosen_logp, rejected_logp        log-prob of the whole answer, nats
    kl                                (log p - log reference)² / 2, mean over the scored tokens of both answers: the
                                      estimator k2 (Schulman 2020) of the divergence from the start. 0 there, never
                                      negative, and finite where rejected answers have become very unlikely, which k3 is
                                      not. The answers are not the policy's own, so it measures distance on the data.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from finery.types.dpo import REFERENCE_FREE, DpoHyperparameters, beta_of
from finery.types.usage import Sku
from finery_gpu_workers.data.packing import Ints
from finery_gpu_workers.data.preference import Pairs
from finery_gpu_workers.losses import preference
from finery_gpu_workers.losses.kl import kl_estimate
from finery_gpu_workers.losses.preference import PreferenceTerms, preference_loss
from finery_gpu_workers.methods import passes
from finery_gpu_workers.methods.dpo_reference import Stored, packed_pairs, reference_of
from finery_gpu_workers.methods.objective import Sums, TimedLearner
from finery_gpu_workers.methods.opening import open_learner
from finery_gpu_workers.methods.prepare import load_prepared
from finery_gpu_workers.work import Ending, Work, stopped_by_customer


def train(work: Work) -> Ending:
    """Runs the job to its end, to the customer's stop, or to a step that is not finite."""
    hyper = work.spec.hyperparameters
    assert isinstance(hyper, DpoHyperparameters)
    data = load_prepared(work)
    sets = {"train": Pairs(data.train)} | ({"validation": Pairs(data.validation)} if data.validation else {})
    needed = hyper.loss not in REFERENCE_FREE
    opened = open_learner(work, reference=needed)
    timed, stored = passes.timed_learner(work, opened.learner), None
    if needed:
        stored = reference_of(work, opened, timed, sets, passes.plan_of(work, sets["train"]))
        opened.learner.drop_reference()
        if stored is None:
            return stopped_by_customer(work.control.intent)
    objective = Dpo(work, sets, timed, hyper, stored)
    return passes.train(work, data, opened, timed, objective, {"reference": stored.place} if stored else {})


class Dpo:
    """The objective, on prepared pairs."""

    train_sku, eval_sku = Sku.TRAIN_DPO, Sku.EVAL_DPO

    def __init__(
        self,
        work: Work,
        sets: dict[str, Pairs],
        timed: TimedLearner,
        hyper: DpoHyperparameters,
        reference: Stored | None,
    ) -> None:
        self.train, self.validation = sets["train"], sets.get("validation")
        self._work, self._timed, self._hyper = work, timed, hyper
        self._reference = reference.sets if reference else {}

    def forward_backward(self, chosen: Ints, update: Ints) -> Sums:
        batch, reference = self._batch("train", self.train, chosen)
        pairs, tokens = len(update), int(self.train.chosen_trained[update].sum())
        sums = Sums()

        def loss(log_probs: Tensor) -> Tensor:
            answers, terms = self._terms(log_probs, batch.scored_counts, reference)
            sums.add(_sums(log_probs.detach(), answers, terms, reference))
            likelihood = self._hyper.sft_weight * answers.chosen.sum() / tokens
            return terms.losses.sum() / pairs - likelihood

        with self._timed.clock.in_learner():
            self._timed.learner.forward_backward_with(batch, loss)
        return sums

    def evaluate(self, chosen: Ints) -> Sums:
        assert self.validation is not None
        batch, reference = self._batch("validation", self.validation, chosen)
        with self._timed.clock.in_learner():
            log_probs = self._timed.learner.log_probs(batch)
        return _sums(log_probs, *self._terms(log_probs, batch.scored_counts, reference), reference)

    def means(self, sums: Sums) -> dict[str, float]:
        found = dict(sums.values)
        pairs, chosen_tokens, divergence = (found.pop(name, 0.0) for name in ("pairs", "chosen_tokens", "kl"))
        means = {name: value / pairs for name, value in found.items()}
        means["loss"] -= self._hyper.sft_weight * found["chosen_logp"] / chosen_tokens
        return means | ({"kl": divergence / sums.tokens} if self._reference else {})

    def manifest(self) -> dict[str, Any]:
        start = self._work.spec.from_checkpoint or self._work.assignment.model_name
        loss = {"name": self._hyper.loss, "beta": beta_of(self._hyper)}
        return {"loss": loss, "reference": start if self._reference else None}

    def _batch(self, name: str, pairs: Pairs, chosen: Ints) -> tuple[Any, Tensor | None]:
        batch = packed_pairs(pairs, chosen)
        if batch.scored != int(pairs.trained[chosen].sum()):
            raise RuntimeError(f"pairs: expected {pairs.trained[chosen].sum()} scored tokens, found {batch.scored}")
        return batch, self._reference[name].of(chosen) if self._reference else None

    def _terms(
        self, log_probs: Tensor, counts: tuple[int, ...], reference: Tensor | None
    ) -> tuple[preference.Pairs, PreferenceTerms]:
        """Answers alternate, chosen and rejected; `counts` are their scored tokens."""
        tokens = torch.tensor(counts, dtype=torch.float32, device=log_probs.device)
        mine = _by_answer(log_probs, counts)
        theirs = None if reference is None else _by_answer(reference.to(log_probs.device), counts)
        answers = preference.Pairs(
            chosen=mine[0::2],
            rejected=mine[1::2],
            chosen_reference=None if theirs is None else theirs[0::2],
            rejected_reference=None if theirs is None else theirs[1::2],
            chosen_tokens=tokens[0::2],
            rejected_tokens=tokens[1::2],
        )
        return answers, preference_loss(answers, self._hyper)


def _by_answer(log_probs: Tensor, counts: tuple[int, ...]) -> Tensor:
    """[scored] → [answers]"""
    return torch.stack([part.sum() for part in log_probs.split(counts)])


def _sums(log_probs: Tensor, answers: preference.Pairs, terms: PreferenceTerms, reference: Tensor | None) -> Sums:
    columns = {
        "loss": terms.losses,
        "margin": terms.margins,
        "accuracy": terms.accuracies,
        "chosen_reward": terms.chosen_rewards,
        "rejected_reward": terms.rejected_rewards,
        "chosen_logp": answers.chosen,
        "rejected_logp": answers.rejected,
        "pairs": torch.ones_like(terms.losses),
        "chosen_tokens": answers.chosen_tokens,
    }
    if reference is not None:
        columns["kl"] = kl_estimate(log_probs, reference.to(log_probs.device), "k2")
    return Sums(len(log_probs), {name: float(column.detach().double().sum()) for name, column in columns.items()})
