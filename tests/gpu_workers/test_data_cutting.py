"""Rows that are too long, and the counts of what became of all rows."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

from finery.types.methods import Truncation
from finery_gpu_workers import run
from finery_gpu_workers.data.chat import RowError
from finery_gpu_workers.data.cutting import Cutter
from finery_gpu_workers.data.statistics import SetStatistics
from finery_gpu_workers.data.tokens import TokenRow
from finery_protos.v1 import worker_pb2 as pb

from .conftest import MakeJob
from .samples import HI, HI_OK, OK, one

BEGIN = 9


def row(tokens: list[int], targets: list[int], reasoning: tuple[tuple[int, int], ...] = (), lost: int = 0) -> TokenRow:
    mask = np.zeros(len(tokens), dtype=np.uint8)
    mask[targets] = 1
    return TokenRow(np.array(tokens, dtype=np.int32), mask, reasoning, lost)


def cut(given: TokenRow, max_length: int, truncation: Truncation, begin: int | None = None) -> TokenRow:
    found = Cutter(max_length, truncation, begin).cut(given)
    assert isinstance(found, TokenRow)
    return found


SIX = row([1, 2, 3, 4, 5, 6], [1, 2, 3, 4, 5])


@pytest.mark.parametrize(("truncation", "tokens"), [("right", [1, 2, 3, 4]), ("left", [3, 4, 5, 6])])
def test_a26_four_of_six_tokens_are_three_targets(truncation: Truncation, tokens: list[int]) -> None:
    kept = cut(SIX, 4, truncation)
    assert kept.tokens.tolist() == tokens
    assert kept.mask.tolist() == [0, 1, 1, 1]
    assert kept.trained == 3
    assert SIX.mask.tolist() == [0, 1, 1, 1, 1, 1]
    assert cut(SIX, 6, truncation).tokens.tolist() == SIX.tokens.tolist()


def test_a_cut_on_the_left_keeps_the_token_that_begins_every_text() -> None:
    kept = cut(row([BEGIN, 2, 3, 4, 5, 6], [1, 2, 3, 4, 5]), 4, "left", BEGIN)
    assert kept.tokens.tolist() == [BEGIN, 4, 5, 6]
    assert kept.mask.tolist() == [0, 1, 1, 1]
    assert cut(SIX, 4, "left", BEGIN).tokens.tolist() == [3, 4, 5, 6]


@pytest.mark.parametrize("truncation", ["right", "left"])
def test_reasoning_that_is_cut_away_is_not_counted_as_trained(truncation: Truncation) -> None:
    given = row([1, 2, 3, 4, 5, 6], [1, 2, 3, 4, 5], reasoning=((1, 4),), lost=2)
    kept = cut(given, 3, truncation)
    assert given.reasoning_tokens == 5
    # right keeps tokens 1 2 3, of which 2 and 3 are reasoning; left keeps 4 5 6, and 4 is no target any more
    assert kept.reasoning_trained == {"right": 2, "left": 0}[truncation]


def test_long_rows_are_dropped_or_refused_as_wanted() -> None:
    assert Cutter(5, "drop").cut(SIX) == "too_long"
    assert isinstance(Cutter(6, "drop").cut(SIX), TokenRow)
    with pytest.raises(RowError, match=r"at most 5 tokens \(hyperparameters.max_length\), found 6") as error:
        Cutter(5, "error").cut(SIX)
    assert error.value.code == "row_too_long"


def test_a18_a_row_whose_answer_is_cut_away_has_nothing_to_train() -> None:
    assert Cutter(20, "right").cut(one(HI_OK)) == "no_trainable_tokens"
    assert Cutter(21, "right").cut(one(HI_OK)) == "no_trainable_tokens"
    assert cut(one(HI_OK), 22, "right").trained == 1  # 'o', at 21
    assert Cutter(20, "left").cut(one([HI_OK[0], HI_OK[1] | {"weight": 0}])) == "no_trainable_tokens"


def counted(*rows: Any, max_length: int = 100) -> SetStatistics:
    statistics, cutter = SetStatistics(format="chat"), Cutter(max_length, "right")
    for line, samples in enumerate(rows, 1):
        kept = [cutter.cut(sample) for sample in samples]
        statistics.add(line, samples, kept, unrolled=len(samples) > 1)
    return statistics


def test_rows_are_counted_by_what_became_of_them() -> None:
    long, short, empty = row([1] * 6, [1, 5]), row([1, 2], [1]), row([1] * 5, [4])
    report = counted([short], [long], [empty], [short, long], [short, empty], [empty], max_length=4).report("d")
    assert (report.rows, report.dropped_rows, report.truncated_rows, report.unrolled_rows) == (4, 2, 3, 2)
    assert (report.dropped, report.dropped_lines) == ({"no_trainable_tokens": 2}, (3, 6))
    assert report.truncated_lines == (2, 4, 5)  # 5 lost one of its two turns
    assert (report.tokens, report.trained_tokens) == (2 + 4 + (2 + 4) + 2, 1 + 1 + (1 + 1) + 1)
    assert (report.shortest, report.longest, report.digest) == (2, 6, "d")


def test_lengths_are_counted_before_the_cut_in_powers_of_two() -> None:
    rows = [[row([1] * n, [n - 1])] for n in (2, 3, 4, 5, 8, 9, 40)]
    report = counted(*rows, max_length=4).report("d")
    bins = [(found.up_to, found.rows) for found in report.lengths]
    assert bins == [
        (2, 1),
        (4, 2),
        (8, 2),
        (16, 1),
        (32, 0),
        (64, 1),
    ]
    assert sum(found.rows for found in report.lengths) == report.rows + report.dropped_rows
    assert (report.shortest, report.longest) == (2, 40)


def test_warnings_say_how_many_and_where() -> None:
    statistics = counted([row([1, 2, 3], [1, 2], ((1, 2),), lost=5)], [row([1, 2], [1])])
    statistics.note("tools_not_rendered", 2)
    found = {warning.code: warning for warning in statistics.warnings("training_file")}
    assert sorted(found) == ["reasoning_not_rendered", "reasoning_not_trained", "tools_not_rendered"]
    assert found["reasoning_not_trained"].details == [{"tokens": 5}]
    assert "6 tokens of reasoning to be trained, found 1: 5 are not" in found["reasoning_not_trained"].message
    assert found["tools_not_rendered"].details == [{"rows": 1, "lines": [2]}]
    assert {warning.param for warning in found.values()} == {"training_file"}
    assert counted([row([1, 2], [1], ((1, 2),))]).warnings("training_file") == []


SILENT = [{"messages": [HI, OK | {"weight": 0}]}, {"messages": [HI, OK | {"weight": 0}]}]


@pytest.mark.parametrize(
    ("rows", "settings", "said", "unsaid"),
    [
        (SILENT, {}, ("2 no_trainable_tokens", "weights are 0"), ("max_length",)),
        ([{"input_ids": [1, 2], "labels": [-100, -100]}], {}, ("labels are -100",), ("max_length",)),
        (
            [{"messages": HI_OK}],
            {"max_length": 20, "truncation": "drop"},
            ("1 too_long", "hyperparameters.max_length, 20", "the longest has 25 tokens"),
            ("weights",),
        ),
        (
            [{"messages": HI_OK}],
            {"max_length": 20},
            ("weights are 0", "cut at hyperparameters.max_length, 20; the longest has 25 tokens"),
            ("drop;",),
        ),
    ],
)
def test_a18_a_job_with_nothing_to_train_says_why_there_is_nothing(
    make_job: MakeJob, rows: list[Any], settings: dict[str, Any], said: tuple[str, ...], unsaid: tuple[str, ...]
) -> None:
    control = make_job(rows, **settings)
    run.main(control.attempt(pb.ATTEMPT_KIND_PREPARE))
    assert control.finished is not None
    assert control.finished.error is not None
    message = control.finished.error.message
    assert [part for part in said if part not in message] == [], message
    assert [part for part in unsaid if part in message] == [], message
