"""What is drawn from logits: the filters on distributions worked by hand, the draws against the exact distribution."""

from __future__ import annotations

import math
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from finery_gpu_workers.errors import WorkerError
from finery_gpu_workers.rollout.drawing import Drawn, draw
from finery_gpu_workers.rollout.types import Sampling

HALVES = [0.5, 0.25, 0.125, 0.125]
TIES = [0.1, 0.2, 0.2, 0.2, 0.3]


def sampling(**given: Any) -> Sampling:
    return Sampling(max_new_tokens=1, **given)


def drawn(chances: list[float], uniforms: list[float], **given: Any) -> Drawn:
    logits = torch.tensor(chances, dtype=torch.float64).log().float().expand(len(uniforms), -1)
    return draw(logits, sampling(**given), np.array(uniforms))


def distribution(chances: list[float], **given: Any) -> dict[int, float]:
    """Token → its chance, as the log-probs of draws all over [0, 1) say; every draw is where the chances put it."""
    uniforms = np.linspace(0, 1, 2000, endpoint=False) + 1 / 4000
    found = drawn(chances, uniforms.tolist(), **given)
    kept = {int(t): math.exp(float(p)) for t, p in zip(found.tokens, found.log_probs, strict=True)}
    ends = dict(zip(sorted(kept), np.cumsum([kept[token] for token in sorted(kept)]), strict=True))
    for uniform, token in zip(uniforms, found.tokens, strict=True):
        assert ends[int(token)] - kept[int(token)] - 1e-6 <= uniform <= ends[int(token)] + 1e-6
    return kept


FILTERS: list[tuple[list[float], dict[str, Any], dict[int, float]]] = [
    (HALVES, {}, {0: 0.5, 1: 0.25, 2: 0.125, 3: 0.125}),
    (HALVES, {"top_k": 2}, {0: 2 / 3, 1: 1 / 3}),
    (HALVES, {"top_k": 1}, {0: 1.0}),
    # Of equals the lower id stays.
    (HALVES, {"top_k": 3}, {0: 4 / 7, 1: 2 / 7, 2: 1 / 7}),
    (TIES, {"top_k": 3}, {1: 2 / 7, 2: 2 / 7, 4: 3 / 7}),
    (HALVES, {"top_k": 100}, {0: 0.5, 1: 0.25, 2: 0.125, 3: 0.125}),
    # The token that crosses the bound stays; where the sum meets it exactly, no further one does.
    (HALVES, {"top_p": 0.6}, {0: 2 / 3, 1: 1 / 3}),
    (HALVES, {"top_p": 0.75}, {0: 2 / 3, 1: 1 / 3}),
    (HALVES, {"top_p": 0.5}, {0: 1.0}),
    (HALVES, {"top_p": 0.01}, {0: 1.0}),
    (HALVES, {"top_p": 0.76}, {0: 4 / 7, 1: 2 / 7, 2: 1 / 7}),
    (TIES, {"top_p": 0.6}, {1: 2 / 7, 2: 2 / 7, 4: 3 / 7}),
    # Of what top_k left (2/3 and 1/3), half is the first alone.
    (HALVES, {"top_k": 2, "top_p": 0.6}, {0: 1.0}),
    (HALVES, {"top_k": 2, "top_p": 0.7}, {0: 2 / 3, 1: 1 / 3}),
    # Relative to the likeliest; on the bound stays.
    (HALVES, {"min_p": 0.5}, {0: 2 / 3, 1: 1 / 3}),
    (HALVES, {"min_p": 0.51}, {0: 1.0}),
    (HALVES, {"min_p": 1.0}, {0: 1.0}),
    (TIES, {"min_p": 0.6}, {1: 2 / 9, 2: 2 / 9, 3: 2 / 9, 4: 3 / 9}),
    (HALVES, {"top_p": 0.9, "min_p": 0.3}, {0: 2 / 3, 1: 1 / 3}),
    # At temperature 1/2 chances are squared: 16, 4, 1, 1 of 22; the filters come after it.
    (HALVES, {"temperature": 0.5}, {0: 16 / 22, 1: 4 / 22, 2: 1 / 22, 3: 1 / 22}),
    (HALVES, {"temperature": 0.5, "min_p": 0.3}, {0: 1.0}),
    (HALVES, {"temperature": 0.5, "top_p": 0.8}, {0: 0.8, 1: 0.2}),
    # At temperature 2 their roots: 2, √2, 1, 1.
    (HALVES, {"temperature": 2.0, "top_k": 2}, {0: 2 / (2 + 2**0.5), 1: 2**0.5 / (2 + 2**0.5)}),
]


@pytest.mark.parametrize(("chances", "given", "expected"), FILTERS)
def test_filters_on_distributions_worked_by_hand(
    chances: list[float], given: dict[str, Any], expected: dict[int, float]
) -> None:
    assert distribution(chances, **given) == pytest.approx(expected, rel=1e-5)


def test_the_uniform_number_chooses_by_the_cumulated_chances() -> None:
    found = drawn(HALVES, [0.0, 0.499, 0.501, 0.749, 0.751, 0.874, 0.876, 1 - 2**-53])
    assert found.tokens.tolist() == [0, 0, 1, 1, 2, 2, 3, 3]
    assert drawn([0.0, 0.0, 1.0, 0.0], [0.0, 1 - 2**-53]).tokens.tolist() == [2, 2]


SETTINGS: list[dict[str, Any]] = [{}, {"top_p": 0.7}, {"top_k": 40}, {"min_p": 0.2}]
SETTINGS += [{"temperature": 0.6, "top_k": 200, "top_p": 0.9, "min_p": 0.01}]


@pytest.mark.parametrize("given", SETTINGS, ids=str)
def test_draws_follow_the_exact_distribution(given: dict[str, Any]) -> None:
    """Chi-square of 20,000 draws over 600 tokens, several of one chance, against the definition, written plainly."""
    generator = np.random.default_rng(5)
    logits = np.round(generator.normal(0, 1.5, 600), 1)
    tokens = np.random.default_rng(6).random(20_000)
    found = draw(torch.from_numpy(logits).float().expand(len(tokens), -1), sampling(**given), tokens)
    chances = np.exp(logits / given.get("temperature", 1.0))
    order = np.lexsort((np.arange(600), -chances))
    kept = order[: given.get("top_k", 600)]
    share = chances[kept] / chances[kept].sum()
    kept = kept[: int(np.searchsorted(share.cumsum(), given.get("top_p", 1.0) - 1e-12)) + 1]
    kept = kept[chances[kept] >= given.get("min_p", 0.0) * chances.max()]
    expected = np.zeros(600)
    expected[kept] = chances[kept] / chances[kept].sum()
    np.testing.assert_allclose(found.log_probs, np.log(expected[found.tokens]), atol=2e-6)
    counts = np.bincount(found.tokens, minlength=600)
    assert not counts[expected == 0].any()
    # Rare tokens in one bin; the quantile of one in a thousand, by Wilson and Hilferty.
    rare = expected * len(tokens) < 10
    bins = [(counts[n], expected[n] * len(tokens)) for n in np.flatnonzero(~rare)]
    if rare.any() and expected[rare].any():
        bins.append((counts[rare].sum(), expected[rare].sum() * len(tokens)))
    statistic, free = sum((seen - wanted) ** 2 / wanted for seen, wanted in bins), len(bins) - 1
    assert free > 10
    assert statistic < free * (1 - 2 / (9 * free) + 3.09 * (2 / (9 * free)) ** 0.5) ** 3


@pytest.mark.parametrize(("given", "kept"), [({"top_p": 0.9}, 4500), ({"top_k": 3000}, 3000), ({"top_p": 0.05}, 250)])
def test_a_flat_distribution_is_cut_where_it_should_be(given: dict[str, Any], kept: int) -> None:
    """Far more equal tokens than are looked at first."""
    found = draw(torch.zeros(300, 5000), sampling(**given), (np.arange(300) + 0.5) / 300)
    np.testing.assert_allclose(found.log_probs, -math.log(kept), atol=1e-5)
    assert found.tokens.max() < kept
    assert found.tokens.max() > kept * 0.99


@given(st.lists(st.floats(-8, 8), min_size=1, max_size=700), st.floats(0, 1, exclude_max=True))
def test_a_row_is_drawn_alike_whatever_stands_next_to_it(logits: list[float], uniform: float) -> None:
    row = torch.tensor(logits)
    alone = draw(row[None], sampling(top_p=0.8, temperature=0.7), np.array([uniform]))
    other = torch.cat((row.flip(0)[None], row[None], torch.zeros(1, len(logits))))
    among = draw(other, sampling(top_p=0.8, temperature=0.7), np.array([0.3, uniform, 0.9]))
    assert (among.tokens[1], among.log_probs[1]) == (alone.tokens[0], alone.log_probs[0])


def test_greedy_takes_the_first_of_the_likeliest_with_its_log_prob_at_temperature_1() -> None:
    found = drawn([0.1, 0.35, 0.2, 0.35], [0.99], temperature=0, top_k=2)
    assert found.tokens.tolist() == [1]
    assert found.log_probs.tolist() == pytest.approx([math.log(0.35)], rel=1e-6)


def test_bfloat16_logits_are_normalised_in_float32() -> None:
    logits = torch.randn(4, 1000, generator=torch.Generator().manual_seed(0)).bfloat16()
    found = draw(logits, sampling(temperature=1.3), np.array([0.1, 0.4, 0.7, 0.9]))
    exact = torch.log_softmax(logits.double() / 1.3, -1)
    expected = exact[torch.arange(4), torch.from_numpy(found.tokens)]
    np.testing.assert_allclose(found.log_probs, expected, atol=1e-6)


@pytest.mark.parametrize("wrong", [float("nan"), float("inf")])
@pytest.mark.parametrize("temperature", [0.0, 1.0])
def test_logits_that_are_none_are_refused(wrong: float, temperature: float) -> None:
    with pytest.raises(WorkerError, match="non_finite_logits"):
        draw(torch.tensor([[0.0, 1.0], [wrong, 1.0]]), sampling(temperature=temperature), np.array([0.5, 0.5]))
