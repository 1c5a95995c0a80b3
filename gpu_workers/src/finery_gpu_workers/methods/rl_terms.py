"""From graded rollouts to what an update trains: shaped rewards, advantages, and who has a part in the loss.

The members of an update are the rollouts that were compared (and not masked for their length): numerator and
denominator are theirs alone, and all of them are computed and billed. One without an advantage has a loss and a
gradient of 0, unless a divergence pulls at it; `dynamic_sampling` leaves such groups out before they come here.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import groupby

import numpy as np

from finery.types.rl import RlHyperparameters
from finery.types.rl_algorithms import ALGORITHMS
from finery_gpu_workers.batch import PackedBatch, SharedRows, pack_shared
from finery_gpu_workers.losses.advantages import advantages, are_equal, overlong_penalty
from finery_gpu_workers.losses.policy import Counts
from finery_gpu_workers.methods.rl_sampling import Rollout, ids_digest


@dataclass(frozen=True)
class UpdateTerms:
    """One optimizer update."""

    counts: Counts
    """Of its members."""
    members: tuple[Rollout, ...]
    """Group by group."""

    def pulls(self, *, divergence: bool) -> bool:
        """One of them has a gradient, by its advantage or by a `divergence`; without, the weights stay as they are."""
        return any(one.advantage or divergence for one in self.members)


def says_something(group: Sequence[Rollout]) -> bool:
    """Its rewards are not all equal."""
    return not are_equal(np.array([one.reward for one in group if one.reward is not None], dtype=np.float64))


def by_group(rollouts: Sequence[Rollout]) -> list[list[Rollout]]:
    """In the order of the groups' numbers."""
    ordered = sorted(rollouts, key=lambda one: (one.group, one.sample))
    return [list(members) for _, members in groupby(ordered, key=lambda one: one.group)]


def shape_rewards(rollouts: Sequence[Rollout], hyper: RlHyperparameters) -> None:
    """Writes the penalty of long answers into their parts, where there is to be one."""
    if hyper.overlong != "penalize":
        return
    assert hyper.overlong_buffer is not None
    limits = {"longest": hyper.max_new_tokens, "buffer": min(hyper.overlong_buffer, hyper.max_new_tokens)}
    for one in rollouts:
        if one.reward is not None:
            one.parts["overlong"] = overlong_penalty(len(one.tokens), **limits)


def compare(rollouts: Sequence[Rollout], hyper: RlHyperparameters) -> None:
    """Writes advantages: of the rewards, with what their parts add to them."""
    assert hyper.advantage_scale is not None
    shaped = [None if one.reward is None else one.reward + sum(one.parts.values()) for one in rollouts]
    found = advantages(
        shaped,
        [one.group for one in rollouts],
        baseline=ALGORITHMS[hyper.algorithm].baseline,
        scale=hyper.advantage_scale,
    )
    for one, value in zip(rollouts, found.values, strict=True):
        one.advantage = value


def is_member(one: Rollout, hyper: RlHyperparameters) -> bool:
    return one.advantage is not None and not (hyper.overlong == "mask" and one.finish == "length")


def update_terms(rollouts: Sequence[Rollout], hyper: RlHyperparameters) -> list[UpdateTerms]:
    """The step's groups over its updates, in order."""
    groups, each = by_group(rollouts), hyper.prompts_per_step // hyper.updates_per_step
    updates = []
    for number in range(hyper.updates_per_step):
        members = [
            one for group in groups[number * each : (number + 1) * each] for one in group if is_member(one, hyper)
        ]
        counts = Counts(len(members), sum(len(one.tokens) for one in members), hyper.max_new_tokens)
        updates.append(UpdateTerms(counts, tuple(members)))
    return updates


def micro_batches(rollouts: Sequence[Rollout], limit: int, *, shared_prompts: bool = True) -> list[list[Rollout]]:
    """Runs of rollouts, in order, of up to `limit` tokens; a longer one is alone.

    A prompt counts once, if the model shares it between rollouts. A group may be split between two runs: its prompt is
    then computed in both.
    """
    runs: list[list[Rollout]] = []
    tokens = 0
    for one in rollouts:
        prompt = len(one.prompt.tokens)
        shared = shared_prompts and bool(runs) and runs[-1][-1].group == one.group
        added = len(one.tokens) + 1 + (0 if shared else prompt)
        if not runs or tokens + added > limit:
            runs.append([])
            tokens, added = 0, len(one.tokens) + 1 + prompt
        runs[-1].append(one)
        tokens += added
    return runs


def packed(rollouts: Sequence[Rollout]) -> PackedBatch:
    """One batch, each prompt once for rollouts of a group in a row; the sampled tokens are its targets.

    Raises RuntimeError unless their ids are those that were sampled.
    """
    rows = []
    for _, members in groupby(rollouts, key=lambda one: one.group):
        group = list(members)
        answers = [(one.tokens, [1.0] * len(one.tokens)) for one in group]
        rows.append(SharedRows(group[0].prompt.tokens, answers))
    batch = pack_shared(rows)
    found = batch.targets[batch.weights > 0].split(batch.scored_counts)
    for one, targets in zip(rollouts, found, strict=True):
        if ids_digest(targets.tolist()) != one.digest:
            raise RuntimeError(f"group {one.group}, sample {one.sample}: the ids to train are not those sampled")
    return batch
