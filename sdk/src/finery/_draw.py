"""Curves as a figure of matplotlib: one panel for each quantity that a job has."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from finery.plot import Curve, Point

_BLUE, _ORANGE, _GREY, _GREEN = "#2563eb", "#ea580c", "#6b7280", "#16a34a"
_COLOURS = (_BLUE, _ORANGE, _GREEN, "#9333ea", "#dc2626", "#0891b2", "#ca8a04", "#db2777")
Draw = Callable[[Any, "Curve", str, bool], None]
"""Axes, what to draw, its colour, and whether it is the only job."""


def draw(curves: Sequence[Curve], title: str) -> Any:
    """A figure with the panels reward, loss, accuracy and learning rate, as far as the curves have them."""
    try:
        from matplotlib.figure import Figure
        from matplotlib.ticker import MaxNLocator
    except ImportError as error:
        raise ImportError('drawing needs matplotlib; run: pip install "finery[plot]"') from error
    panels = _panels(curves)
    heights = [height for _, height, _ in panels]
    figure = Figure(figsize=(8, 3 + 0.5 * sum(heights)), dpi=150, layout="constrained")
    grid = figure.subplots(len(panels), 1, sharex=True, height_ratios=heights, squeeze=False)
    for axes, (name, _, panel) in zip(grid[:, 0], panels, strict=True):
        for n, one in enumerate(curves):
            panel(axes, one, _COLOURS[n % len(_COLOURS)], len(curves) == 1)
        axes.set(ylabel=name)
        axes.grid(visible=True, color=_GREY, alpha=0.15)
        axes.spines[["top", "right"]].set_visible(False)
        if axes.get_legend_handles_labels()[1]:
            axes.margins(y=0.15)
            axes.legend(frameon=False)
    grid[0, 0].set_title(_literal(title), loc="left", fontsize=11, fontweight="bold")
    grid[-1, 0].set(xlabel="step")
    grid[-1, 0].xaxis.set_major_locator(MaxNLocator(integer=True))
    return figure


def _panels(curves: Sequence[Curve]) -> list[tuple[str, int, Draw]]:
    """Name with unit, height, and who draws it."""
    units = {"dpo": "nats per pair", "sft": "nats per token"}
    methods = {one.method for one in curves if one.loss or one.validation}
    unit = f" ({units[methods.pop()]})" if len(methods) == 1 else ""
    known: list[tuple[bool, tuple[str, int, Draw]]] = [
        (any(one.reward or one.held_out_reward for one in curves), ("reward", 4, _rewards)),
        (any(one.loss or one.validation for one in curves), (f"loss{unit}", 4, _losses)),
        (any(one.accuracy or one.held_out_accuracy for one in curves), ("accuracy", 2, _accuracies)),
        (any(one.learning_rate for one in curves), ("learning rate", 1, _learning_rate)),
    ]
    return [panel for there, panel in known if there]


def _losses(axes: Any, one: Curve, colour: str, alone: bool) -> None:
    """Training loss thin and, smoothed, thick; validation loss with marks; a star on the best checkpoint."""
    _noisy(axes, one.loss, colour, f"{_name(one, alone)}training loss (smoothed)")
    held_out = _ORANGE if alone else colour
    _marked(axes, one.validation, held_out, f"{_name(one, alone)}held-out loss", alone)
    if one.method != "rl":
        _star(axes, one, held_out, alone)


def _rewards(axes: Any, one: Curve, colour: str, alone: bool) -> None:
    """Mean reward of a step's rollouts as losses are; held-out rewards with their confidence intervals."""
    _noisy(axes, one.reward, colour, f"{_name(one, alone)}training reward (smoothed)")
    held_out = _ORANGE if alone else colour
    found = one.held_out_reward
    _marked(axes, [(at.step, at.mean) for at in found], held_out, f"{_name(one, alone)}held-out reward", alone)
    bounded = [(at.step, at.mean, at.low, at.high) for at in found if at.low is not None and at.high is not None]
    if bounded:
        steps, means, lows, highs = zip(*bounded, strict=True)
        below = [max(0.0, mean - low) for mean, low in zip(means, lows, strict=True)]
        above = [max(0.0, high - mean) for mean, high in zip(means, highs, strict=True)]
        axes.errorbar(steps, means, yerr=[below, above], fmt="none", ecolor=held_out, elinewidth=1, capsize=3)
    if one.method == "rl":
        _star(axes, one, held_out, alone)


def _accuracies(axes: Any, one: Curve, colour: str, alone: bool) -> None:
    _noisy(axes, one.accuracy, colour, f"{_name(one, alone)}training accuracy (smoothed)")
    _marked(axes, one.held_out_accuracy, _ORANGE if alone else colour, f"{_name(one, alone)}held-out accuracy", alone)
    axes.set_ylim(-0.05, 1.05)


def _learning_rate(axes: Any, one: Curve, colour: str, _alone: bool) -> None:
    if one.learning_rate:
        axes.plot(*zip(*one.learning_rate, strict=True), color=colour, linewidth=1.2)


def _noisy(axes: Any, found: Sequence[Point], colour: str, label: str) -> None:
    if found:
        steps, values = zip(*found, strict=True)
        axes.plot(steps, values, color=colour, alpha=0.25, linewidth=1)
        axes.plot(steps, smoothed(values), color=colour, linewidth=2, label=label)


def _marked(axes: Any, found: Sequence[Point], colour: str, label: str, alone: bool) -> None:
    """With the numbers of the first and the last, if there is but one job."""
    if not found:
        return
    style = {"marker": "o", "markersize": 4, "linewidth": 1.2, "linestyle": "-" if alone else "--"}
    axes.plot(*zip(*found, strict=True), color=colour, label=label, **style)
    for step, value in {found[0], found[-1]} if alone else ():
        axes.annotate(f"{value:.3f}", (step, value), (0, 8), textcoords="offset points", ha="center", color=colour)


def _star(axes: Any, one: Curve, colour: str, alone: bool) -> None:
    if one.best is not None:
        step, value = one.best
        label = f"{_name(one, alone)}best checkpoint: {value:.3f} at step {step}"
        axes.plot([step], [value], color=colour, marker="*", markersize=14, linestyle="none", label=label)


def smoothed(values: Iterable[float]) -> list[float]:
    """Exponential moving average without the pull towards its start (Adam's bias correction); span ≈ a tenth."""
    numbers = list(values)
    weight = 1 - 2 / (max(3, len(numbers) // 10) + 1)
    result, average = [], 0.0
    for count, value in enumerate(numbers, start=1):
        average = weight * average + (1 - weight) * value
        result.append(average / (1 - weight**count))
    return result


def _name(one: Curve, alone: bool) -> str:
    return "" if alone else f"{_literal(one.label)}: "


def _literal(text: str) -> str:
    """A name as it is: matplotlib would set what is between dollars as a formula."""
    return text.replace("$", r"\$")
