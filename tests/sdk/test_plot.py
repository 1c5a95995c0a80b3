from __future__ import annotations

from pathlib import Path
from typing import Any
from xml.etree import ElementTree

import pytest

from finery.plot import loss_curve, points, smoothed
from finery.types.jobs import Event

from .support import event_json


def event(seq: int, type_: str, **data: Any) -> Event:
    return Event.model_validate(event_json(seq, type_, **data))


HISTORY = [
    event(1, "state", to="running"),
    event(2, "eval", step=0, loss=3.94),
    *(event(2 + n, "metric", step=n, loss=4.0 - 0.01 * n) for n in range(1, 31)),
    event(33, "metric", step=31, loss=None, non_finite={"loss": "NaN"}),
    event(34, "eval", step=31, loss=3.48),
]


def test_points_are_the_finite_losses_by_step() -> None:
    assert points(HISTORY, "eval") == [(0, 3.94), (31, 3.48)]
    assert [step for step, _ in points(HISTORY, "metric")] == list(range(1, 31))


def test_smoothing_keeps_a_constant_and_lags_a_slope() -> None:
    assert smoothed([2.0] * 50) == pytest.approx([2.0] * 50)
    # Span 3, weight ½, corrected: 1, (¼·1 + ½·4) / ¾ = 3, (⅛·1 + ¼·4 + ½·1) / ⅞ = 13/7.
    assert smoothed([1.0, 4.0, 1.0]) == pytest.approx([1.0, 3.0, 13 / 7])


def test_a_png_is_a_png(tmp_path: Path) -> None:
    path = loss_curve(HISTORY, tmp_path / "loss.png")
    assert path.read_bytes().startswith(b"\x89PNG\r\n")


def test_an_svg_holds_both_curves_title_and_axes(tmp_path: Path) -> None:
    path = loss_curve(iter(HISTORY), str(tmp_path / "loss.SVG"), title="A & B")
    text = path.read_text(encoding="utf-8")
    assert ElementTree.fromstring(text).tag.endswith("svg")
    for comment in ("A &amp; B", "step", "loss (nats per token)", "held-out loss", "3.480"):
        assert f"<!-- {comment}" in text


@pytest.mark.parametrize("name", ["loss", "loss.pdf", "loss.png.txt"])
def test_another_ending_is_refused(tmp_path: Path, name: str) -> None:
    with pytest.raises(ValueError, match=r"\.png or \.svg"):
        loss_curve(HISTORY, tmp_path / name)


def test_nothing_to_draw_is_an_error(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match="nothing to draw"):
        loss_curve([HISTORY[0], HISTORY[-2]], tmp_path / "loss.png")
    assert list(tmp_path.iterdir()) == []
