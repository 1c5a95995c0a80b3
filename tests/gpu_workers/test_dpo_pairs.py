"""Pairs as the learner is given them."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from finery.types.methods import DpoHyperparameters, FullWeights
from finery_gpu_workers.data.preference import Pairs
from finery_gpu_workers.data.prepared import PreparedSet
from finery_gpu_workers.learner import Learner
from finery_gpu_workers.methods.dpo_reference import Reference, packed_pairs
from finery_gpu_workers.models.load import load_model

FULL = FullWeights(type="full")


def set_of(pairs: list[tuple[bytes, bytes, bytes]]) -> PreparedSet:
    rows = [[(p, c), (p, r)] for p, c, r in pairs]
    sides = [side for row in rows for side in row]
    tokens = [np.frombuffer(p + a, dtype=np.uint8).astype(np.int32) for p, a in sides]
    masks = [np.array([0] * len(p) + [1] * len(a), dtype=np.uint8) for p, a in sides]
    lengths, prompts = np.array([len(t) for t in tokens]), np.array([len(p) for p, _ in sides])
    shard: dict[str, Any] = {
        "tokens": np.concatenate(tokens),
        "mask": np.concatenate(masks),
        "offsets": np.concatenate(([0], np.cumsum(lengths))),
    }
    trained_tokens = np.array([int(m.sum()) for m in masks])
    return PreparedSet((shard,), lengths, trained_tokens, np.array([0, len(tokens)]), prompts)


def test_b13_answers_are_scored_in_the_context_of_their_prompt_and_nothing_else_is(tiny_folder: Path) -> None:
    pairs = Pairs(set_of([(b"one prompt", b"yes", b"never"), (b"another one", b"yes", b"never")]))
    batch = packed_pairs(pairs, np.arange(2))
    assert batch.scored_counts == (3, 5, 3, 5)
    assert bytes(batch.targets[batch.weights > 0].tolist()) == b"yesnever" * 2
    model = load_model(tiny_folder, device="cpu", dtype=torch.float32)
    learner = Learner.create(model, FULL, DpoHyperparameters(), seed=0)
    found = learner.log_probs(batch).split([8, 8])
    assert float((found[0] - found[1]).abs().min()) > 1e-4
    # What would be predicted inside a prompt counts for nothing, not even in the gradient.
    gradients = []
    for wrong in (0, 77):
        batch.targets[batch.weights == 0] = wrong
        learner.forward_backward_with(batch, lambda log_probs: log_probs[:3].sum() - log_probs[3:].sum())
        gradients.append(learner._parameters.gradients.clone())
        learner._parameters.gradients.zero_()
    assert torch.equal(*gradients)
    assert gradients[0].any()


def test_pairs_without_a_prompt_score_what_has_something_before_it() -> None:
    """Their first tokens are no targets, as truncation leaves them."""
    samples = set_of([(b"", b"yes", b"never")])
    for start in (0, 3):
        samples.shards[0]["mask"][start] = 0
    batch = packed_pairs(Pairs(samples), np.arange(1))
    assert (batch.parents, batch.scored_counts) == ((), (2, 4))


def test_a_reference_is_found_pair_by_pair_in_any_order() -> None:
    pairs = Pairs(set_of([(b"p", b"a", b"bc"), (b"q", b"def", b"g"), (b"r", b"h", b"i")]))
    one = Reference.empty(pairs)
    one.put(np.array([1, 0]), torch.arange(7.0))
    assert one.of(np.array([0])).tolist() == [4.0, 5.0, 6.0]
    assert one.of(np.array([0, 1])).tolist() == [4.0, 5.0, 6.0, 0.0, 1.0, 2.0, 3.0]
    with pytest.raises(RuntimeError, match="found none"):
        one.of(np.array([2]))
