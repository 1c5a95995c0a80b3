"""Text similarity against numbers by hand."""

from __future__ import annotations

import math
from itertools import combinations
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from finery.types.ids import new_id
from finery_gpu_workers.environments.rewards import open_rewards
from finery_gpu_workers.environments.similarity import MAX_CHARACTERS, METRICS, longest_common
from finery_gpu_workers.environments.types import Answer

from .test_environments import SPEC

CAT = "the cat sat on the mat"
RAN = "the cat ran on the mat"
# Unigrams: 5 of 6 are common (the twice, cat, on, mat). Bigrams: the cat, on the, the mat: 3 of 5. Trigrams: on the
# mat: 1 of 4. Four-grams: none of 3.
BLEU = (5 / 6 * (3 + 1) / (5 + 1) * (1 + 1) / (4 + 1) * (0 + 1) / (3 + 1)) ** 0.25


@pytest.mark.parametrize(
    ("metric", "text", "reference", "score"),
    [
        # fuzz.ratio("this is a test", "this is a test!") is 96.55 in rapidfuzz's README
        ("fuzzy_match", "this is a test", "this is a test!", 28 / 29),
        ("fuzzy_match", "kitten", "sitting", 8 / 13),  # i, t, t, n
        ("fuzzy_match", "", "", 1.0),
        ("fuzzy_match", "a", "", 0.0),
        ("rouge_1", CAT, RAN, 5 / 6),
        ("rouge_2", CAT, RAN, 3 / 5),
        ("rouge_l", CAT, RAN, 5 / 6),
        ("rouge_l", "The  MAT, the cat!", CAT, 2 * 2 / (4 + 6)),  # the cat
        ("rouge_1", "the the the", "the cat", 2 * 1 / (3 + 2)),  # clipped
        ("rouge_2", "cat", "cat", 1.0),
        ("rouge_2", "cat", "dog", 0.0),
        ("rouge_1", "красный ДОМ", "дом красный", 1.0),
        ("bleu", CAT, RAN, BLEU),
        ("bleu", CAT, CAT, 1.0),
        ("bleu", "the cat", "the cat sat", math.exp(1 - 3 / 2)),  # all of it is right, but it is short
        ("bleu", "dog", "cat", 0.0),
        ("bleu", "", "cat", 0.0),
        ("gleu", CAT, RAN, (5 + 3 + 1 + 0) / (6 + 5 + 4 + 3)),
        ("gleu", "the cat", "the cat sat", (2 + 1) / (3 + 2 + 1)),  # recall is the lower one
        ("gleu", "the cat sat", "the cat", (2 + 1) / (3 + 2 + 1)),  # precision is
    ],
)
def test_metrics_by_hand(metric: str, text: str, reference: str, score: float) -> None:
    assert METRICS[metric](text, reference) == pytest.approx(score, rel=1e-12)


@given(st.text("ab", max_size=7), st.text("ab", max_size=7))
def test_the_longest_common_subsequence(first: str, second: str) -> None:
    def parts(text: str) -> set[str]:
        return {"".join(chosen) for size in range(len(text) + 1) for chosen in combinations(text, size)}

    assert longest_common(first, second) == max(len(part) for part in parts(first) & parts(second))


@given(st.sampled_from(sorted(METRICS)), st.text(max_size=30), st.text(max_size=30))
def test_scores_are_between_0_and_1_and_1_for_the_same(metric: str, first: str, second: str) -> None:
    assert 0.0 <= METRICS[metric](first, second) <= 1.0
    assert METRICS[metric](first, first) == pytest.approx(1.0)


def test_long_texts_are_not_compared(tmp_path: Path) -> None:
    grader = {"type": "text_similarity", "evaluation_metric": "fuzzy_match", "reference": "{{ item.answer }}"}
    spec = SPEC.validate_python({"type": "prompts", "file": new_id("file", 2), "grader": grader})
    rewards = open_rewards(spec, tmp_path, workers=1, score_models={})
    assert rewards.submit(Answer("x" * MAX_CHARACTERS, {"answer": "y"})).result().reward == 0.0
    long = rewards.submit(Answer("x" * (MAX_CHARACTERS + 1), {"answer": "y"})).result()
    assert long.failure is not None
    assert "found 65537" in long.failure.message
    rewards.close()
