"""A job's loss as a picture. Needs the extra `plot`: pip install "finery[plot]"."""

from __future__ import annotations

import math
import os
from collections.abc import Iterable
from pathlib import Path

from finery.types.jobs import Event

_BLUE, _ORANGE, _GREY = "#2563eb", "#ea580c", "#6b7280"
Point = tuple[int, float]


def loss_curve(events: Iterable[Event], path: str | os.PathLike[str], *, title: str | None = None) -> Path:
    """Draw training loss (raw and smoothed) and held-out loss over steps; PNG or SVG by the ending of `path`.

    Raises ValueError if there is nothing to draw or the ending is another, ImportError without matplotlib.
    """
    target = Path(path)
    if target.suffix.lower() not in (".png", ".svg"):
        raise ValueError(f"expected a path that ends in .png or .svg, found {str(target)!r}")
    history = list(events)
    train, held_out = points(history, "metric"), points(history, "eval")
    if not train and not held_out:
        raise ValueError("no metric or eval event with a finite loss among the events; there is nothing to draw")
    try:
        from matplotlib.figure import Figure
    except ImportError as error:
        raise ImportError('drawing needs matplotlib; run: pip install "finery[plot]"') from error
    figure = Figure(figsize=(8, 4.5), dpi=150, layout="constrained")
    axes = figure.add_subplot()
    if train:
        steps, losses = zip(*train, strict=True)
        axes.plot(steps, losses, color=_BLUE, alpha=0.25, linewidth=1)
        axes.plot(steps, smoothed(losses), color=_BLUE, linewidth=2, label="training loss (smoothed)")
    if held_out:
        axes.plot(*zip(*held_out, strict=True), color=_ORANGE, marker="o", linewidth=1.2, label="held-out loss")
        for step, loss in (held_out[0], held_out[-1]):
            axes.annotate(f"{loss:.3f}", (step, loss), (0, 8), textcoords="offset points", ha="center", color=_ORANGE)
    axes.set(xlabel="step", ylabel="loss (nats per token)")
    axes.set_title(title or f"Loss of {history[0].job}", loc="left", fontsize=11, fontweight="bold")
    axes.grid(visible=True, color=_GREY, alpha=0.15)
    axes.spines[["top", "right"]].set_visible(False)
    axes.margins(y=0.15)
    axes.legend(frameon=False)
    figure.savefig(target)
    return target


def points(events: Iterable[Event], kind: str) -> list[Point]:
    """(step, loss) of all events of that type with a finite loss, by step."""
    found = {
        int(event.data["step"]): float(event.data["loss"])
        for event in events
        if event.type == kind and event.data.get("loss") is not None
    }
    return sorted((step, loss) for step, loss in found.items() if math.isfinite(loss))


def smoothed(values: Iterable[float]) -> list[float]:
    """Exponential moving average without the pull towards its start (Adam's bias correction); span ≈ a tenth."""
    numbers = list(values)
    weight = 1 - 2 / (max(3, len(numbers) // 10) + 1)
    result, average = [], 0.0
    for count, value in enumerate(numbers, start=1):
        average = weight * average + (1 - weight) * value
        result.append(average / (1 - weight**count))
    return result
