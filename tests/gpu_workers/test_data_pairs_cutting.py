"""Pairs that are longer than `max_length`: cases B03 and B05, and what holds for all."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from finery.types.spec import Truncation
from finery_gpu_workers.data.cutting import Cutter
from finery_gpu_workers.data.preference import Pairs
from finery_gpu_workers.data.tokens import TokenRow
from finery_testing.tiny import BOS, EOS

from .in_process import Render, rendered
from .pairs import ids, masks, pairs_of, texts, with_bos

__all__ = ["rendered"]  # the fixture


def test_bos_stays_in_front_of_a_prompt_that_is_cut(rendered: Render, tmp_path: Path) -> None:
    """5 tokens of prompt and 4 of the longer answer into 7: two go, behind BOS; into 4: BOS and the last 3."""
    model, row = with_bos(tmp_path / "m"), {"prompt": "pqrs", "chosen": "abc", "rejected": "x"}
    (pair,) = pairs_of(rendered, [row], model=model, max_length=7, truncation="left")
    assert ids(pair) == ([BOS, *b"rs"], [*b"abc", EOS], [*b"x", EOS])
    (pair,) = pairs_of(rendered, [row], model=model, max_length=4, truncation="left")
    assert ids(pair) == ([BOS], [*b"bc", EOS], [*b"x", EOS])
    assert masks(pair) == ([1, 1, 1], [1, 1])


def test_b03_each_pair_is_cut_by_its_own_length(rendered: Render) -> None:
    """Pair 2 keeps its last 6: nothing of the prompt, so that the first token left is no target."""
    first, second = texts(2, 2, 2), texts(2, 10, 2)
    both = pairs_of(rendered, [first, second], max_length=6, truncation="left")
    assert ids(both[0]) == ([*b"pq"], [*b"a", EOS], [*b"x", EOS])
    assert ids(both[1]) == ([], [*b"efghi", EOS], [*b"x", EOS])
    assert [len(pair.chosen) for pair in both] == [2, 6]
    assert masks(both[1]) == ([0, 1, 1, 1, 1, 1], [0, 1])
    for alone, pair in zip((first, second), both, strict=True):
        (found,) = pairs_of(rendered, [alone], max_length=6, truncation="left")
        assert ids(found) == ids(pair)


def test_b05_no_more_is_cut_than_is_too_long(rendered: Render) -> None:
    """The counts are those of the longer side: 12 of which 10 are left; the shorter one loses as much prompt."""
    row = texts(6, 6, 3)
    found = rendered("dpo", [row], max_length=10, truncation="left")
    report = found.train
    assert ids(Pairs(found.data.train).pair(0)) == ([*b"rstu"], [*b"abcde", EOS], [*b"xy", EOS])
    assert (report.longest, report.truncated_rows, report.truncated_lines) == (12, 1, (1,))
    assert (report.tokens, report.trained_tokens) == (4 + 6 + 3, 6 + 3)


@pytest.mark.parametrize(
    ("row", "limit", "left"),
    [
        (texts(6, 6, 3), 10, ("pqrstu", "abcd", "xy$")),
        (texts(6, 6, 6), 7, ("pqrstu", "a", "x")),
        (texts(2, 4, 4), 6, ("pq", "abc$", "xyz$")),
    ],
)
def test_right_cuts_the_ends_of_answers(rendered: Render, row: Any, limit: int, left: tuple[str, str, str]) -> None:
    (pair,) = pairs_of(rendered, [row], max_length=limit, truncation="right")
    found = ("".join("$" if n == EOS else chr(n) for n in part) for part in ids(pair))
    assert tuple(found) == left


def test_pairs_with_nothing_to_learn_are_dropped_and_counted(rendered: Render) -> None:
    """In line 2 the cut leaves the same answer twice, in line 3 none; line 4 is as long as it may be."""
    same = {"prompt": "pqrs", "chosen": "abcd", "rejected": "abXY"}
    rows = [texts(3, 9, 2), same, texts(6, 2, 2), texts(4, 2, 2)]
    found = rendered("dpo", rows, max_length=6)
    report = found.train
    assert len(Pairs(found.data.train)) == report.rows == 2
    assert report.dropped == {"identical_answers": 1, "no_trainable_tokens": 1}
    assert (report.dropped_lines, report.truncated_lines) == ((2, 3), (1,))
    report = rendered("dpo", rows, max_length=6, truncation="drop").train
    assert (report.rows, report.dropped) == (1, {"too_long": 3})
    refused = rendered("dpo", rows, max_length=6, truncation="error")
    assert refused.problems == [(line, "", "row_too_long") for line in (1, 2, 3)]
    assert "found 12" in refused.result["problems"][0]["message"]


# ---- what holds for all pairs


def side(prompt: int, answer: int, first: int) -> TokenRow:
    """Ids that tell their place: the prompt's from 0, an answer's from `first`."""
    tokens = [*range(prompt), *range(first, first + answer)]
    return TokenRow(
        np.array(tokens, dtype=np.int32), np.array([0] * prompt + [1] * answer, dtype=np.uint8), prompt=prompt
    )


_LENGTHS = st.integers(1, 12)


@given(_LENGTHS, _LENGTHS, _LENGTHS, st.integers(2, 20), st.sampled_from(["right", "left"]), st.booleans())
def test_no_token_is_cut_that_would_fit_and_the_prompt_stays_the_same(
    prompt: int, chosen: int, rejected: int, limit: int, truncation: Truncation, bos: bool
) -> None:
    rows = [side(prompt, chosen, 1000), side(prompt, rejected, 2000)]
    cutter = Cutter(limit, truncation, 0 if bos else None)
    kept = cutter.cut_pair(rows)
    if isinstance(kept, str):
        assert kept == "no_trainable_tokens"
        assert prompt >= limit if truncation == "right" else 1 in (chosen, rejected, limit - bos)
        return
    longest = max(len(row.tokens) for row in rows)
    assert max(len(row.tokens) for row in kept) == min(limit, longest)
    assert kept[0].prompt == kept[1].prompt
    assert kept[0].tokens[: kept[0].prompt].tolist() == kept[1].tokens[: kept[1].prompt].tolist()
    for row, before in zip(kept, rows, strict=True):
        answer = row.tokens[row.prompt :].tolist()
        whole = before.tokens[prompt:].tolist()
        assert answer == (whole[: len(answer)] if truncation == "right" else whole[len(whole) - len(answer) :])
        assert row.mask.tolist() == [int(n > 0 and token >= 1000) for n, token in enumerate(row.tokens.tolist())]
        if truncation == "left":
            assert len(answer) == len(whole) or row.prompt == int(bos), "the prompt goes first"
            assert not bos or row.tokens[0] == 0
        else:
            assert row.prompt == prompt
