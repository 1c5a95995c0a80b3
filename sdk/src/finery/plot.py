"""Jobs as a picture: losses, learning rate, best checkpoint. Needs the extra `plot`: pip install "finery[plot]"."""

from __future__ import annotations

import base64
import io
import math
import os
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from finery.types.jobs import Event, Job

_BLUE, _ORANGE, _GREY, _GREEN = "#2563eb", "#ea580c", "#6b7280", "#16a34a"
_COLOURS = (_BLUE, _ORANGE, _GREEN, "#9333ea", "#dc2626", "#0891b2", "#ca8a04", "#db2777")
Point = tuple[int, float]


@dataclass(frozen=True)
class Curve:
    """What is drawn of one job, by step."""

    label: str
    loss: tuple[Point, ...]
    validation: tuple[Point, ...]
    learning_rate: tuple[Point, ...]
    best: Point | None
    """Step and validation loss of the best checkpoint."""


class Plot:
    """A picture that shows itself in a notebook; `save` writes it. `figure` is matplotlib's own."""

    def __init__(self, figure: Any) -> None:
        self.figure = figure

    def save(self, path: str | os.PathLike[str]) -> Path:
        """Write it as PNG or SVG, by the ending. Raises ValueError if it is another."""
        target = _target(path)
        self.figure.savefig(target)
        return target

    def _repr_html_(self) -> str:
        image = io.BytesIO()
        self.figure.savefig(image, format="png")
        return f'<img alt="losses" src="data:image/png;base64,{base64.b64encode(image.getvalue()).decode()}">'


def loss_curve(events: Iterable[Event], path: str | os.PathLike[str], *, title: str | None = None) -> Path:
    """Draw one job from its events alone; PNG or SVG by the ending of `path`.

    Raises ValueError if there is nothing to draw or the ending is another, ImportError without matplotlib.
    """
    target = _target(path)
    history = list(events)
    one = _curve("", history, None)
    _check([one])
    return Plot(_draw([one], title or f"Loss of {history[0].job}")).save(target)


def curve(job: Job, events: Iterable[Event]) -> Curve:
    """What is drawn of a job."""
    return _curve(job.name or job.id, list(events), job.best_checkpoint)


def picture(curves: Sequence[Curve], path: str | os.PathLike[str] | None = None) -> Plot:
    """One job, or several in one picture; also into `path` if it is given.

    Raises ValueError if there is nothing to draw or the ending is another, ImportError without matplotlib.
    """
    check_request(curves, path)
    _check(curves)
    title = f"Loss of {curves[0].label}" if len(curves) == 1 else f"Losses of {len(curves)} jobs"
    plot = Plot(_draw(curves, title))
    if path is not None:
        plot.save(path)
    return plot


def points(events: Iterable[Event], kind: str, field: str = "loss") -> list[Point]:
    """(step, value) of all events of that type with a finite value, by step; a repeated step has its last value."""
    found = {
        int(event.data["step"]): float(event.data[field])
        for event in events
        if event.type == kind and event.data.get(field) is not None
    }
    return sorted((step, value) for step, value in found.items() if math.isfinite(value))


def smoothed(values: Iterable[float]) -> list[float]:
    """Exponential moving average without the pull towards its start (Adam's bias correction); span ≈ a tenth."""
    numbers = list(values)
    weight = 1 - 2 / (max(3, len(numbers) // 10) + 1)
    result, average = [], 0.0
    for count, value in enumerate(numbers, start=1):
        average = weight * average + (1 - weight) * value
        result.append(average / (1 - weight**count))
    return result


def _curve(label: str, events: list[Event], best: str | None) -> Curve:
    checkpoints = [event.data for event in events if event.type == "checkpoint"]
    known = [one for one in checkpoints if one.get("validation_loss") is not None]
    chosen = [one for one in known if one.get("checkpoint") == best] if best is not None else known
    # Of equals the earliest: min takes the first, and a job's events come in order.
    found = min(chosen, key=lambda one: float(one["validation_loss"]), default=None)
    return Curve(
        label=label,
        loss=tuple(points(events, "metric")),
        validation=tuple(points(events, "eval")),
        learning_rate=tuple(points(events, "metric", "learning_rate")),
        best=None if found is None else (int(found["step"]), float(found["validation_loss"])),
    )


def _check(curves: Sequence[Curve]) -> None:
    if not any(one.loss or one.validation for one in curves):
        raise ValueError("no metric or eval event with a finite loss among the events; there is nothing to draw")


def check_request(jobs: Sequence[object], path: str | os.PathLike[str] | None) -> None:
    """Raises ValueError for what could not be drawn whatever the jobs hold."""
    if not jobs:
        raise ValueError("expected at least one job to draw, found none")
    if path is not None:
        _target(path)


def _target(path: str | os.PathLike[str]) -> Path:
    target = Path(path)
    if target.suffix.lower() not in (".png", ".svg"):
        raise ValueError(f"expected a path that ends in .png or .svg, found {str(target)!r}")
    return target


def _draw(curves: Sequence[Curve], title: str) -> Any:
    try:
        from matplotlib.figure import Figure
    except ImportError as error:
        raise ImportError('drawing needs matplotlib; run: pip install "finery[plot]"') from error
    rates = any(one.learning_rate for one in curves)
    figure = Figure(figsize=(8, 5.5 if rates else 4.5), dpi=150, layout="constrained")
    if rates:
        losses, below = figure.subplots(2, 1, sharex=True, height_ratios=(4, 1))
    else:
        losses, below = figure.add_subplot(), None
    for n, one in enumerate(curves):
        _losses(losses, one, _COLOURS[n % len(_COLOURS)], alone=len(curves) == 1)
        if below is not None and one.learning_rate:
            below.plot(*zip(*one.learning_rate, strict=True), color=_COLOURS[n % len(_COLOURS)], linewidth=1.2)
    losses.set(ylabel="loss (nats per token)")
    losses.set_title(_literal(title), loc="left", fontsize=11, fontweight="bold")
    losses.margins(y=0.15)
    losses.legend(frameon=False)
    for axes in (losses, below):
        if axes is not None:
            axes.grid(visible=True, color=_GREY, alpha=0.15)
            axes.spines[["top", "right"]].set_visible(False)
    if below is not None:
        below.set(ylabel="learning rate")
    (losses if below is None else below).set(xlabel="step")
    return figure


def _losses(axes: Any, one: Curve, colour: str, *, alone: bool) -> None:
    """Training loss thin and, smoothed, thick; validation loss with marks; a star on the best checkpoint."""
    name = "" if alone else f"{_literal(one.label)}: "
    held_out = _ORANGE if alone else colour
    if one.loss:
        steps, values = zip(*one.loss, strict=True)
        axes.plot(steps, values, color=colour, alpha=0.25, linewidth=1)
        axes.plot(steps, smoothed(values), color=colour, linewidth=2, label=f"{name}training loss (smoothed)")
    if one.validation:
        style = {"marker": "o", "markersize": 4, "linewidth": 1.2, "linestyle": "-" if alone else "--"}
        axes.plot(*zip(*one.validation, strict=True), color=held_out, label=f"{name}held-out loss", **style)
        for step, loss in {one.validation[0], one.validation[-1]} if alone else ():
            axes.annotate(f"{loss:.3f}", (step, loss), (0, 8), textcoords="offset points", ha="center", color=held_out)
    if one.best is not None:
        step, loss = one.best
        label = f"{name}best checkpoint: {loss:.3f} at step {step}"
        axes.plot([step], [loss], color=held_out, marker="*", markersize=14, linestyle="none", label=label)


def _literal(text: str) -> str:
    """A name as it is: matplotlib would set what is between dollars as a formula."""
    return text.replace("$", r"\$")
