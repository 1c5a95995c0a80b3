"""From graded rollouts to the terms of an update: who has a part in the loss, and how batches are packed."""

from __future__ import annotations

import pytest

from finery.types.rl import RlHyperparameters
from finery_gpu_workers.losses.policy import Counts
from finery_gpu_workers.methods.rl_sampling import Rollout
from finery_gpu_workers.methods.rl_terms import compare, micro_batches, packed, shape_rewards, update_terms
from finery_testing.tiny import IM_END

from .rl_jobs import hyper, rollout


def compared(rollouts: list[Rollout], settings: RlHyperparameters) -> list[Rollout]:
    compare(rollouts, settings)
    return rollouts


# ---- who has a part in the loss


def test_a_failed_rollout_is_not_trained_not_counted_not_compared_with() -> None:
    rollouts = compared(
        [rollout(0, 0, 1.0), rollout(0, 1, None), rollout(0, 2, 0.0, (5,))], hyper(samples_per_prompt=3)
    )
    assert [one.advantage for one in rollouts] == pytest.approx([0.707107, None, -0.707107], abs=1e-6)
    (update, _) = update_terms(rollouts, hyper(updates_per_step=2))
    assert [one.sample for one in update.members] == [0, 2]
    assert update.counts == Counts(sequences=2, tokens=3, longest=8)


def test_c08_masked_answers_are_in_neither_numerator_nor_denominator() -> None:
    """4 tokens ended by an end token; 6 tokens cut at the limit: they are compared with, and that is all."""
    settings = hyper(overlong="mask", max_new_tokens=6, loss_normalization="token")
    whole, cut = rollout(0, 0, 1.0, (5, 6, 7, 8)), rollout(0, 1, 0.0, (5,) * 6, finish="length")
    (update,) = update_terms(compared([whole, cut], settings), settings)
    assert (update.members, update.counts) == ((whole,), Counts(sequences=1, tokens=4, longest=6))
    assert whole.advantage == pytest.approx(0.707107, abs=1e-6)


def test_long_answers_lose_some_of_their_reward() -> None:
    """Of 8 tokens the buffer is 4: 6 tokens cost 1/2."""
    settings = hyper(overlong="penalize", overlong_buffer=4)
    rollouts = [rollout(0, 0, 1.0, (5,) * 6), rollout(0, 1, 1.0, (5,) * 4), rollout(0, 2, None, (5,) * 8)]
    shape_rewards(rollouts, settings)
    assert [one.parts for one in rollouts] == [{"overlong": -0.5}, {"overlong": 0.0}, {}]
    assert [one.reward for one in rollouts] == [1.0, 1.0, None]
    compare(rollouts, settings)
    assert [one.advantage for one in rollouts] == pytest.approx([-0.707107, 0.707107, None], abs=1e-6)


@pytest.mark.parametrize("divergence", [False, True])
def test_without_an_advantage_nothing_pulls_unless_a_divergence_does(divergence: bool) -> None:
    silent = compared([rollout(0, n, 1.0) for n in range(2)], hyper())
    mixed = compared([*silent, *(rollout(1, n, float(n)) for n in range(2))], hyper())
    for rollouts, pulls in ((silent, divergence), (mixed, True), ([], False)):
        (update,) = update_terms(rollouts, hyper())
        assert update.pulls(divergence=divergence) == pulls
        assert len(update.members) == update.counts.sequences == len(rollouts), "all are counted"


def test_groups_are_split_over_updates_with_counts_of_their_own() -> None:
    settings = hyper(prompts_per_step=4, updates_per_step=2)
    rollouts = [rollout(g, n, float(n), (5,) * (g + 1)) for g in range(3) for n in range(2)]
    first, second = update_terms(compared(rollouts, settings), settings)
    assert {one.group for one in first.members} == {0, 1}
    assert {one.group for one in second.members} == {2}
    assert (first.counts.tokens, second.counts.tokens) == (2 + 4, 6)


# ---- batches


def test_a_prompt_counts_once_in_a_micro_batch() -> None:
    """Prompts of 3 tokens, answers of 2 and their first place: 3 + 2 × 3 = 9 tokens."""
    rollouts = [rollout(g, n, 0.0) for g in range(2) for n in range(3)]
    assert [len(run) for run in micro_batches(rollouts, 9)] == [2, 1, 2, 1]
    assert [len(run) for run in micro_batches(rollouts, 12)] == [3, 3]
    assert [len(run) for run in micro_batches(rollouts, 1)] == [1] * 6
    assert [len(run) for run in micro_batches(rollouts, 100)] == [6]
    assert micro_batches([], 9) == []
    # A model that does not share prompts computes 3 + 1 + 2 tokens for each.
    assert [len(run) for run in micro_batches(rollouts, 12, shared_prompts=False)] == [2, 2, 2]


def test_only_what_was_sampled_is_scored_the_end_token_included() -> None:
    batch = packed([rollout(0, 0, 0.0, (7, IM_END)), rollout(0, 1, 0.0, (8,)), rollout(1, 0, 0.0, (9, 9, IM_END))])
    assert batch.targets[batch.weights > 0].tolist() == [7, IM_END, 8, 9, 9, IM_END]
    assert batch.scored_counts == (2, 1, 3)


def test_c14_other_ids_than_those_sampled_are_never_trained() -> None:
    one = rollout(0, 0, 0.0, (7, IM_END))
    assert one.completion is not None
    one.completion.tokens[0] = 8
    with pytest.raises(RuntimeError, match="not those sampled"):
        packed([one])
