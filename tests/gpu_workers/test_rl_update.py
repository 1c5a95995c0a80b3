"""From graded rollouts to gradients: who has a part in the loss, and what the updates of a step compute."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any
from unittest import mock

import pytest
import torch
from torch import Tensor

from finery.types.methods import LoraAdapter
from finery.types.rl import RlHyperparameters
from finery_gpu_workers.batch import pack
from finery_gpu_workers.learner import Learner
from finery_gpu_workers.losses import policy
from finery_gpu_workers.methods import rl_update
from finery_gpu_workers.methods.rl_report import step_metrics
from finery_gpu_workers.methods.rl_sample import Sampled
from finery_gpu_workers.methods.rl_sampling import Rollout
from finery_gpu_workers.methods.rl_terms import (
    packed,
)
from finery_gpu_workers.methods.rl_update import Updated, Updater
from finery_gpu_workers.models.load import load_model
from finery_testing.tiny import IM_END

from .rl_jobs import hyper, prompt, rollout

# ---- the updates


@pytest.fixture
def learner(tiny_folder: Path) -> Learner:
    made = Learner.create(
        load_model(tiny_folder, device="cpu", dtype=torch.float32), LoraAdapter(rank=4, alpha=8.0), hyper(), seed=0
    )
    with torch.no_grad():  # so that both of its matrices have gradients
        made._parameters.values.add_(0.02 * torch.randn(made._parameters.values.shape, generator=seeded()))
    made._tied_to.refresh()
    made.keep_reference()
    return made


def seeded() -> torch.Generator:
    return torch.Generator().manual_seed(1)


def graded(rewards: list[list[float]], length: int = 3) -> list[Rollout]:
    """Groups of different prompts; no two answers are alike."""
    return [
        rollout(g, n, reward, tuple(10 * g + n + k for k in range(length)), prompt=prompt(g, (65 + g, 66, 67)))
        for g, group in enumerate(rewards)
        for n, reward in enumerate(group)
    ]


def run(learner: Learner, settings: RlHyperparameters, rollouts: list[Rollout], micro: int = 1000) -> Updated:
    return Updater(learner, settings, micro).run(rollouts, lambda _: 1e-3)


@contextmanager
def gradients_kept(learner: Learner) -> Iterator[list[Tensor]]:
    """The gradient of every update, as the optimizer meets it."""
    kept: list[Tensor] = []
    step = learner.optim_step

    def keeping(rate: float) -> Any:
        kept.append(learner._parameters.gradients.clone())
        return step(rate)

    with mock.patch.object(learner, "optim_step", keeping):
        yield kept


def by_hand(learner: Learner, rollouts: list[Rollout], weights: dict[tuple[int, int], float]) -> Tensor:
    """The gradient of -Σ weight × log-probs, every rollout in a row of its own."""
    for one in rollouts:
        tokens = [*one.prompt.tokens.tolist(), *one.tokens]
        batch = pack([(tokens, [0.0] * len(one.prompt.tokens) + [1.0] * len(one.tokens))])
        weight = weights[one.group, one.sample]
        learner.forward_backward_with(batch, lambda log_probs, w=weight: -w * log_probs.sum())  # type: ignore[misc]
    found = learner._parameters.gradients.clone()
    learner._parameters.gradients.zero_()
    return found


@pytest.mark.parametrize("algorithm", ["grpo", "dr_grpo", "rloo", "dapo", "gspo", "cispo"])
def test_the_first_gradient_is_that_of_the_policy_gradient(learner: Learner, algorithm: Any) -> None:
    """Two groups {1, 0} and {3, 1}, 3 tokens each: weights by hand, 4 sequences of 12 tokens, 8 at most."""
    settings = hyper(algorithm=algorithm, importance_cap=None, overlong="keep")
    means = {"grpo": 1 / 12, "dapo": 1 / 12, "gspo": 1 / 12, "cispo": 1 / 12, "dr_grpo": 1 / 32, "rloo": 1 / 32}
    apart = {"dr_grpo": ((0.5, -0.5), (1, -1)), "rloo": ((1, -1), (2, -2))}
    half = 0.5**0.5
    values = apart.get(algorithm, ((half, -half), (half, -half)))
    weights = {(g, n): values[g][n] * means[algorithm] for g in range(2) for n in range(2)}
    rollouts = graded([[1.0, 0.0], [3.0, 1.0]])
    expected = by_hand(learner, rollouts, weights)
    with gradients_kept(learner) as kept:
        updated = run(learner, settings, rollouts)
    assert float(expected.norm()) > 1e-4
    assert torch.allclose(kept[0], expected, atol=1e-7, rtol=1e-4)
    assert updated.sums.means(reference=False)["ratio_mean"] == 1.0
    assert updated.sums.clipped == 0
    assert all(one.trained for one in rollouts)


def test_micro_batches_and_shared_prompts_do_not_change_the_gradient(learner: Learner) -> None:
    found = []
    for micro in (1, 12, 1000):
        with gradients_kept(learner) as kept, mock.patch.object(learner._optimizer, "step"):
            run(learner, hyper(), graded([[1.0, 0.0], [3.0, 1.0]]), micro)
        found.append(kept[0])
    assert torch.allclose(found[0], found[2], atol=1e-7, rtol=1e-4)
    assert torch.allclose(found[1], found[2], atol=1e-7, rtol=1e-4)


def test_an_end_token_alone_has_a_gradient(learner: Learner) -> None:
    rollouts = [rollout(0, 0, 1.0, (IM_END,)), rollout(0, 1, 0.0, (IM_END,))]
    rollouts[1].advantage = None
    with gradients_kept(learner) as kept:
        run(learner, hyper(advantage_scale="none"), [rollouts[0], rollout(0, 1, 0.0, (65,))])
    assert float(kept[0].norm()) > 1e-4


def test_c08_a_step_whose_answers_are_all_masked_trains_nothing(learner: Learner) -> None:
    settings = hyper(overlong="mask")
    rollouts = [rollout(0, n, float(n), finish="length") for n in range(2)]
    updated = run(learner, settings, rollouts)
    assert (updated.updates, updated.finite, updated.loss, learner.version) == (0, True, 0.0, 0)
    assert updated.sums.means(reference=False) == {}


def test_c08_the_mean_length_of_trained_answers_is_that_of_those_in_the_loss(learner: Learner) -> None:
    settings = hyper(overlong="mask", loss_normalization="token")
    rollouts = [rollout(0, 0, 1.0, (5, 6, 7, 8)), rollout(0, 1, 0.0, (5,) * 6, finish="length")]
    updated = run(learner, settings, rollouts)
    metrics = step_metrics(Sampled(rollouts, rollouts), updated, reference=False)
    assert (metrics["trained_tokens_mean"], metrics["new_tokens_mean"], updated.sums.tokens) == (4, 5, 4)


def test_equal_rewards_leave_every_number_as_it_is(learner: Learner) -> None:
    before = learner._parameters.values.clone()
    updated = run(learner, hyper(), graded([[1.0, 1.0], [0.0, 0.0]]))
    assert (updated.updates, learner.version) == (0, 0)
    assert torch.equal(learner._parameters.values, before)


def test_c05_a_divergence_still_pulls_where_rewards_are_equal(learner: Learner) -> None:
    settings, rollouts = hyper(kl_coefficient=0.1), graded([[1.0, 1.0]])
    with torch.no_grad():
        learner._parameters.values.add_(0.05 * torch.randn(learner._parameters.values.shape, generator=seeded()))
    learner._tied_to.refresh()
    learner._optimizer.steps = 1  # as if that had been a step
    apart = run(learner, settings, rollouts).sums.means(reference=True)["kl"]
    assert apart > 1e-4
    for _ in range(30):
        closer = run(learner, settings, rollouts).sums.means(reference=True)["kl"]
    assert closer < apart / 2
    assert run(learner, hyper(), rollouts).updates == 0


def test_at_the_reference_a_divergence_alone_takes_no_step(learner: Learner) -> None:
    """Its gradient is 0 there, and the optimizer would only count it, and decay weights."""
    before = learner._parameters.values.clone()
    rollouts = graded([[1.0, 1.0], [0.0, 0.0]])
    updated = run(learner, hyper(kl_coefficient=0.5, weight_decay=0.5), rollouts)
    assert (updated.updates, learner.version) == (0, 0)
    assert torch.equal(learner._parameters.values, before)
    assert updated.sums.tokens == sum(len(one.tokens) for one in rollouts), "all are scored, and billed"


def test_at_the_reference_there_is_no_divergence(learner: Learner) -> None:
    for placement in ("loss", "reward"):
        rollouts = graded([[1.0, 0.0]])
        settings = hyper(kl_coefficient=0.5, kl_placement=placement, updates_per_step=1)
        with mock.patch.object(learner._optimizer, "step"):
            updated = run(learner, settings, rollouts)
        assert updated.sums.kl == 0.0
        assert updated.updates == 1
        if placement == "reward":
            assert [one.parts["kl"] for one in rollouts] == [0.0, 0.0]


def test_as_a_reward_the_divergence_is_taken_off_before_rollouts_are_compared(learner: Learner) -> None:
    with torch.no_grad():
        learner._parameters.values.mul_(1.5)
    learner._tied_to.refresh()
    rollouts = graded([[1.0, 1.0]])
    settings = hyper(kl_coefficient=2.0, kl_placement="reward", kl_estimator="k1", advantage_scale="none")
    mine = learner.log_probs(packed(rollouts))
    with learner.reference():
        reference = learner.log_probs(packed(rollouts))
    updated = run(learner, settings, rollouts)
    charges = [-2.0 * float(part.sum()) for part in (mine - reference).split(3)]
    assert [one.parts["kl"] for one in rollouts] == pytest.approx(charges, abs=1e-6)
    assert rollouts[0].advantage == pytest.approx((charges[0] - charges[1]) / 2, abs=1e-6)
    assert [one.reward for one in rollouts] == [1.0, 1.0]
    assert updated.sums.means(reference=True)["kl"] == pytest.approx(float((mine - reference).mean()), abs=1e-6)


def test_no_reference_is_computed_without_a_coefficient(learner: Learner) -> None:
    with mock.patch.object(learner, "reference", side_effect=AssertionError):
        assert "kl" not in run(learner, hyper(), graded([[1.0, 0.0]])).sums.means(reference=False)


@pytest.mark.parametrize("micro", [1, 15, 1000])
def test_with_several_updates_the_old_policy_is_the_one_before_the_first(learner: Learner, micro: int) -> None:
    """The first update's ratios are exactly 1; the second's are not, as the policy has moved."""
    ratios: list[Tensor] = []
    terms = policy.policy_terms

    def spying(*args: Any, **kwargs: Any) -> Any:
        found = terms(*args, **kwargs)
        ratios.append(found.ratios)
        return found

    settings = hyper(prompts_per_step=4, updates_per_step=2)
    with mock.patch.object(rl_update, "policy_terms", spying):
        updated = Updater(learner, settings, micro).run(graded([[1.0, 0.0, 0.5]] * 4), lambda _: 0.05)
    assert updated.updates == learner.version == 2
    found = torch.cat(ratios)
    assert torch.equal(found[:18], torch.ones(18))
    assert float((found[18:] - 1).abs().max()) > 1e-3


def test_importance_weights_scale_what_the_sampler_made_too_likely(learner: Learner) -> None:
    """The sampler says log-prob -1 for each token, the learner less: weights are far below 1."""
    rollouts = graded([[1.0, 0.0]])
    log_probs = learner.log_probs(packed(rollouts))
    with gradients_kept(learner) as plain, mock.patch.object(learner._optimizer, "step"):
        run(learner, hyper(importance_cap=None), rollouts)
    with gradients_kept(learner) as weighed, mock.patch.object(learner._optimizer, "step"):
        updated = run(learner, hyper(importance_cap=2.0), rollouts)
    means = updated.sums.means(reference=False)
    assert means["importance_mean"] == pytest.approx(float((log_probs + 1).exp().mean()), rel=1e-4)
    assert means["sampler_gap"] == pytest.approx(float((log_probs + 1).abs().mean()), rel=1e-4)
    assert float(weighed[0].norm()) < 0.1 * float(plain[0].norm())


def test_what_is_not_finite_ends_the_updates_and_changes_nothing(learner: Learner) -> None:
    rollouts, before = graded([[1.0, 0.0], [1.0, 0.0]]), learner._parameters.values.clone()
    assert rollouts[0].completion is not None
    rollouts[0].completion.log_probs[0] = float("nan")
    updated = Updater(learner, hyper(updates_per_step=2), 1000).run(rollouts, lambda _: 0.05)
    assert (updated.finite, updated.updates) == (False, 1)
    assert torch.equal(learner._parameters.values, before)
    assert not any(one.trained for one in rollouts)
