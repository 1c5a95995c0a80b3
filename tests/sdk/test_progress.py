from __future__ import annotations

import io
from decimal import Decimal
from typing import Any

import pytest
from rich.console import Console

from finery.progress import JobProgress, JobView, TransferProgress
from finery.types.jobs import Event

from .support import event_json


def event(seq: int, type_: str = "metric", **data: Any) -> Event:
    return Event.model_validate(event_json(seq, type_, **data))


def metric(step: int, total: int = 100, **more: Any) -> Event:
    measured = {"loss": 2.0, "tokens_per_second": 100.0, "step_seconds": 2.0, "cost": "0.25"}
    return event(step, step=step, total_steps=total, **{**measured, **more})


def test_a_view_adds_up_what_the_events_say() -> None:
    view = JobView()
    assert view.take(event(1, "state", to="queued", message="Busy.")) == "queued: Busy."
    assert view.take(event(2, "prepared", rows=64, trained_tokens=900, total_steps=100))
    assert (view.state, view.total_steps, view.eta_seconds) == ("queued", 100, None)
    assert view.take(metric(10)) is None
    assert (view.step, view.loss, view.cost, view.eta_seconds) == (10, 2.0, Decimal("0.25"), 180.0)
    view.take(metric(11, step_seconds=7.0, tokens_per_second=50.0))
    # A fifth of the way to the newest: 2 + 0.2 (7 - 2) = 3 s and 100 - 0.2 · 50 = 90 tok/s, 89 steps to go.
    assert (view.seconds_per_step, view.tokens_per_second, view.eta_seconds) == (3.0, 90.0, 267.0)
    assert view.line() == "loss 2.000  90 tok/s  ETA 4:27  $0.250000"
    assert view.take(event(4, "eval", step=11, loss=3.48)) == "held-out loss 3.4800 after step 11"
    assert (
        view.take(event(5, "attempt", phase="started", number=2, resumed_from_step=8))
        == "attempt 2 goes on from step 8"
    )
    assert view.take(event(6, "attempt", phase="started", number=1)) is None


def test_the_evaluation_before_training_shows_as_progress() -> None:
    view = JobView()
    sets: dict[str, Any] = {"train": {}, "validation": {}}
    said = view.take(
        event(1, "prepared", rows=64, trained_tokens=900, total_steps=9, dropped_rows=2, statistics={"sets": sets})
    )
    assert said == "prepared 64 rows, 900 tokens to learn from, 2 left out"
    assert view.take(event(2, "state", to="running")) == "running: evaluating before training"
    assert view.line() == "evaluating before training"
    assert view.take(event(3, "eval", step=0, loss=3.94)) == "held-out loss 3.9400 before training"
    assert view.line() == ""
    view.take(metric(4))
    assert view.line().startswith("loss 2.000")


def test_a_checkpoint_that_is_the_best_so_far_says_so() -> None:
    view = JobView()
    said = [
        view.take(event(n, "checkpoint", checkpoint=f"ckpt_{n}", step=n, validation_loss=loss))
        for n, loss in ((1, 3.5), (2, 3.5), (3, 3.25))
    ]
    assert said == [
        "checkpoint ckpt_1 at step 1, held-out loss 3.5000 (best so far)",
        "checkpoint ckpt_2 at step 2, held-out loss 3.5000",
        "checkpoint ckpt_3 at step 3, held-out loss 3.2500 (best so far)",
    ]


def test_a_number_that_rounds_to_zero_has_no_sign() -> None:
    view = JobView()
    view.take(metric(1, loss=-2.2e-8, reward=-0.0001, accuracy=-0.001))
    assert view.line().startswith("reward 0.000  loss 0.000  accuracy 0%")


def test_a_loss_that_is_not_finite_and_unknown_events_do_no_harm() -> None:
    view = JobView()
    view.take(metric(1, loss=None, cost=None, tokens_per_second=None))
    view.take(event(2, "telepathy", anything=1))
    assert view.line() == "loss –  – tok/s  ETA 3:18  $0.000000"


@pytest.mark.parametrize(("steps", "lines"), [(5, 5), (100, 20), (1000, 21)])
def test_without_a_terminal_a_line_comes_now_and_then_the_first_and_the_last_always(steps: int, lines: int) -> None:
    written = io.StringIO()
    with JobProgress(Console(file=written, width=200)) as progress:
        for step in range(1, steps + 1):
            progress(metric(step, steps))
    told = written.getvalue().splitlines()
    assert (told[0].split()[1], told[-1].split()[1]) == (f"1/{steps}", f"{steps}/{steps}")
    assert lines <= len(told) <= lines + 2


def test_on_a_terminal_one_bar_shows_step_loss_speed_eta_and_cost() -> None:
    written = io.StringIO()
    console = Console(file=written, force_terminal=True, width=120, color_system=None)
    with JobProgress(console, label="[bot]") as progress:
        progress(event(1, "state", to="running"))
        progress(metric(40))
    last = [line for line in written.getvalue().replace("\r", "\n").splitlines() if "loss" in line][-1]
    for part in ("[bot] running", "40/100", "loss 2.000", "100 tok/s", "ETA 2:00", "$0.25"):
        assert part in last


def test_a_transfer_shows_its_bytes_on_a_terminal_only() -> None:
    for terminal in (True, False):
        written = io.StringIO()
        with TransferProgress("a[1].bin", Console(file=written, force_terminal=terminal, width=100)) as progress:
            progress(500_000, 1_000_000)
        assert ("a[1].bin" in written.getvalue()) == terminal
        assert ("0.5/1.0 MB" in written.getvalue()) == terminal


def test_an_upload_that_is_over_says_what_goes_on() -> None:
    written = io.StringIO()
    console = Console(file=written, force_terminal=True, width=120)
    with TransferProgress("a.jsonl", console, after="the server checks its rows") as progress:
        progress(1_000_000, 1_000_000)
    assert "a.jsonl, the server checks its rows" in written.getvalue()
