"""Cases about the data that a whole job trains on and bills."""

from __future__ import annotations

import math
from collections import Counter
from typing import Any

import pytest

from finery_gpu_workers.batch import PackedBatch
from finery_gpu_workers.learner import Learner

from .conftest import MakeJob, ended, last_manifest, trained
from .test_resume_properties import recorded


def chat(user: str, assistant: str) -> Any:
    return {"messages": [{"role": "user", "content": user}, {"role": "assistant", "content": assistant}]}


def test_a18_a_dropped_row_is_neither_trained_nor_billed(make_job: MakeJob) -> None:
    """By F-CHAT the short rows have 22 tokens, 2 of them trained; the answer of the third begins at position 24."""
    control = trained(make_job([chat("", "x"), chat("", "y"), chat("hello", "z"), chat("", "z")], max_length=22))
    assert ended(control) == "completed"
    assert all(math.isfinite(step.metrics["loss"]) for step in control.steps)
    assert sum(u.quantity for step in control.steps for u in step.usage) == 3 * 2
    assert control.prepared is not None
    assert (control.prepared.dropped_rows, control.prepared.total_trained_tokens) == (1, 3 * 2)
    train = last_manifest(control)["data"]["sets"]["train"]
    assert (train["dropped"], train["dropped_lines"]) == ({"no_trainable_tokens": 1}, [3])


def test_a23_a_last_update_with_fewer_rows_is_an_update_of_its_own(
    make_job: MakeJob, monkeypatch: pytest.MonkeyPatch
) -> None:
    """5 rows of 25 tokens, one to a micro batch, two to an update, 2 epochs."""
    passes: list[tuple[int, int]] = []
    forward_backward = Learner.forward_backward

    def spying(self: Learner, batch: PackedBatch, denominator: int) -> Any:
        passes.append((len(batch.lengths), denominator))
        return forward_backward(self, batch, denominator)

    monkeypatch.setattr(Learner, "forward_backward", spying)
    rows = [chat("hi", answer) for answer in ("ok", "no", "ay", "we", "do")]
    hyper = {"epochs": 2, "batch_tokens": 50, "micro_batch_tokens": 25, "schedule": "linear", "warmup_ratio": 0.0}
    with recorded() as updates:
        control = trained(make_job(rows, learning_rate=0.06, **hyper))
    assert ended(control) == "completed"
    assert control.prepared is not None
    assert control.prepared.total_steps == len(control.steps) == 6
    assert [len(update) for update in updates] == [2, 2, 1, 2, 2, 1]
    assert Counter(row for update in updates for row in update) == Counter(dict.fromkeys(range(5), 2))
    # 3 trained tokens to a row; the update of one row is divided by its own.
    assert passes == [(1, 6)] * 4 + [(1, 3)] + [(1, 6)] * 4 + [(1, 3)]
    assert [u.quantity for step in control.steps for u in step.usage] == [6, 6, 3, 6, 6, 3]
    rates = [step.metrics["learning_rate"] for step in control.steps]
    assert rates == pytest.approx([0.06, 0.05, 0.04, 0.03, 0.02, 0.01])
