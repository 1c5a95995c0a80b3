"""Jobs as a picture: losses or rewards, learning rate, best checkpoint.

Needs the extra `plot`: pip install "finery[plot]".
"""

from __future__ import annotations

import base64
import io
import math
import os
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

from finery import _draw
from finery.types.jobs import Event, Job

Point = tuple[int, float]


@dataclass(frozen=True)
class Evaluation:
    """A held-out reward, with the bounds of its confidence interval where it has one."""

    step: int
    mean: float
    low: float | None
    high: float | None


@dataclass(frozen=True)
class Curve:
    """What is drawn of one job, by step. What its method does not have is empty."""

    label: str
    method: Literal["sft", "dpo", "rl"]
    loss: tuple[Point, ...]
    """Empty for RL, whose loss says nothing about how good the model is."""
    validation: tuple[Point, ...]
    accuracy: tuple[Point, ...]
    """DPO."""
    held_out_accuracy: tuple[Point, ...]
    reward: tuple[Point, ...]
    """RL: mean of a step's rollouts."""
    held_out_reward: tuple[Evaluation, ...]
    learning_rate: tuple[Point, ...]
    best: Point | None
    """Step and validation loss (RL: reward) of the best checkpoint."""


class Plot:
    """A picture that shows itself in a notebook; `save` writes it. `figure` is matplotlib's own."""

    def __init__(self, figure: Any, shows: str = "losses") -> None:
        self.figure = figure
        self._shows = shows

    def save(self, path: str | os.PathLike[str]) -> Path:
        """Write it as PNG or SVG, by the ending. Raises ValueError if it is another."""
        target = _target(path)
        self.figure.savefig(target)
        return target

    def _repr_html_(self) -> str:
        image = io.BytesIO()
        self.figure.savefig(image, format="png")
        return f'<img alt="{self._shows}" src="data:image/png;base64,{base64.b64encode(image.getvalue()).decode()}">'


def loss_curve(events: Iterable[Event], path: str | os.PathLike[str], *, title: str | None = None) -> Path:
    """Draw one job from its events alone: losses, of DPO accuracies too; PNG or SVG by the ending of `path`.

    Raises ValueError if there is nothing to draw or the ending is another, ImportError without matplotlib.
    """
    return _alone(list(events), path, title, "loss")


def reward_curve(events: Iterable[Event], path: str | os.PathLike[str], *, title: str | None = None) -> Path:
    """Draw one RL job from its events alone: the reward of every step, and held-out rewards with their intervals.

    Raises ValueError if there is nothing to draw or the ending is another, ImportError without matplotlib.
    """
    return _alone(list(events), path, title, "reward")


def _alone(
    history: list[Event], path: str | os.PathLike[str], title: str | None, what: Literal["loss", "reward"]
) -> Path:
    target = _target(path)
    one = _curve(history[0].job if history else "", history, None)
    _check([one])
    if (one.method == "rl") != (what == "reward"):
        raise ValueError(f"expected the events of a job with a {what}, found those of a job with method {one.method}")
    return Plot(_draw.draw([one], title or _title([one]))).save(target)


def curve(job: Job, events: Iterable[Event]) -> Curve:
    """What is drawn of a job."""
    return _curve(job.name or job.id, list(events), job.best_checkpoint)


def picture(curves: Sequence[Curve], path: str | os.PathLike[str] | None = None) -> Plot:
    """One job, or several in one picture; also into `path` if it is given.

    Raises ValueError if there is nothing to draw or the ending is another, ImportError without matplotlib.
    """
    check_request(curves, path)
    _check(curves)
    plot = Plot(_draw.draw(curves, _title(curves)), _quantities(curves).lower())
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


def _curve(label: str, events: list[Event], best: str | None) -> Curve:
    method = _method(events)
    rl = method == "rl"
    return Curve(
        label=label,
        method=method,
        loss=() if rl else tuple(points(events, "metric")),
        validation=() if rl else tuple(points(events, "eval")),
        accuracy=tuple(points(events, "metric", "accuracy")),
        held_out_accuracy=tuple(points(events, "eval", "accuracy")),
        reward=tuple(points(events, "metric", "reward")),
        held_out_reward=tuple(_evaluations(events)),
        learning_rate=tuple(points(events, "metric", "learning_rate")),
        best=_best(events, best, "validation_reward" if rl else "validation_loss"),
    )


def _method(events: Iterable[Event]) -> Literal["sft", "dpo", "rl"]:
    fields = {name for event in events if event.type in ("metric", "eval") for name in event.data}
    return "rl" if "reward" in fields else "dpo" if "margin" in fields else "sft"


def _evaluations(events: Sequence[Event]) -> list[Evaluation]:
    low, high = (dict(points(events, "eval", name)) for name in ("reward_low", "reward_high"))
    return [Evaluation(step, mean, low.get(step), high.get(step)) for step, mean in points(events, "eval", "reward")]


def _best(events: Iterable[Event], best: str | None, field: str) -> Point | None:
    """The job's own word, or the earliest of the lowest loss or highest reward."""
    known = [one.data for one in events if one.type == "checkpoint" and one.data.get(field) is not None]
    chosen = [one for one in known if one.get("checkpoint") == best] if best is not None else known
    sign = -1 if field == "validation_reward" else 1
    # Of equals the earliest: min takes the first, and a job's events come in order.
    found = min(chosen, key=lambda one: sign * float(one[field]), default=None)
    return None if found is None else (int(found["step"]), float(found[field]))


def _title(curves: Sequence[Curve]) -> str:
    if len(curves) > 1:
        return f"{_quantities(curves)} of {len(curves)} jobs"
    return f"{'Reward' if curves[0].method == 'rl' else 'Loss'} of {curves[0].label}"


def _quantities(curves: Sequence[Curve]) -> str:
    rewards = [one.method == "rl" for one in curves]
    return "Rewards" if all(rewards) else "Rewards and losses" if any(rewards) else "Losses"


def _check(curves: Sequence[Curve]) -> None:
    if not any(one.loss or one.validation or one.reward or one.held_out_reward for one in curves):
        raise ValueError("no metric or eval event with a finite loss or reward; there is nothing to draw")


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
