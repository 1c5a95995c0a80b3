"""Live progress of jobs and transfers. `JobProgress` needs nothing but a job's events.

with JobProgress() as progress:
    client.jobs.wait(job.id, on_event=progress)

`job.stream()` and `job.wait(progress=True)` do that by themselves.
"""

from __future__ import annotations

import sys
from dataclasses import dataclass
from decimal import Decimal
from types import TracebackType
from typing import Any, Self

from rich.console import Console
from rich.markup import escape
from rich.progress import (
    BarColumn,
    DownloadColumn,
    Progress,
    TaskID,
    TextColumn,
    TimeRemainingColumn,
    TransferSpeedColumn,
)

from finery.types.jobs import Event

_SMOOTH = 0.2  # weight of the newest step in the averages that are shown
_PLAIN_LINES = 20  # lines about steps where no terminal shows a bar


@dataclass
class JobView:
    """What a job's events add up to. Pure."""

    state: str = "validating"
    message: str | None = None
    step: int = 0
    total_steps: int | None = None
    loss: float | None = None
    tokens_per_second: float | None = None
    seconds_per_step: float | None = None
    """Of whole steps, averaged; the newest count most."""
    has_validation: bool = False
    held_out_loss: float | None = None
    best: float | None = None
    """Lowest held-out loss of a checkpoint so far."""
    cost: Decimal = Decimal(0)
    """US dollars so far."""

    def take(self, event: Event) -> str | None:
        """Take an event in; a sentence if it is news besides progress."""
        data = event.data
        match event.type:
            case "state":
                self.state, self.message = str(data.get("to")), data.get("message")
                said = self.message or (self.line() if not self.step else "")
                return f"{self.state}: {said}" if said else self.state
            case "prepared":
                return self._prepare(data)
            case "metric":
                self._measure(event)
                return None
            case "eval":
                self.held_out_loss = data.get("loss")
                when = "before training" if data.get("step") == 0 else f"after step {data.get('step')}"
                return f"held-out loss {_number(self.held_out_loss, '.4f')} {when}"
            case "checkpoint":
                return self._keep(data)
            case "attempt" if data.get("phase") == "started" and data.get("resumed_from_step"):
                return f"attempt {data.get('number')} goes on from step {data.get('resumed_from_step')}"
            case "warning":
                return f"warning: {data.get('message', data)}"
        return None

    def _prepare(self, data: dict[str, Any]) -> str:
        self.total_steps = data.get("total_steps")
        self.has_validation = "validation" in ((data.get("statistics") or {}).get("sets") or {})
        lost = {"left out": data.get("dropped_rows"), "truncated": data.get("truncated_rows")}
        more = "".join(f", {count} {what}" for what, count in lost.items() if count)
        return f"prepared {data.get('rows')} rows, {data.get('trained_tokens')} tokens to learn from{more}"

    def _keep(self, data: dict[str, Any]) -> str:
        said = f"checkpoint {data.get('checkpoint')} at step {data.get('step')}"
        loss = data.get("validation_loss")
        if loss is None:
            return said
        better = self.best is None or loss < self.best
        self.best = loss if better else self.best
        return f"{said}, held-out loss {_number(loss, '.4f')}" + (" (best so far)" if better else "")

    def _measure(self, event: Event) -> None:
        data = event.data
        self.step = data.get("step", self.step)
        self.total_steps = data.get("total_steps") or self.total_steps
        self.loss = data.get("loss")
        self.tokens_per_second = _average(self.tokens_per_second, data.get("tokens_per_second"))
        self.seconds_per_step = _average(self.seconds_per_step, data.get("step_seconds"))
        if data.get("cost") is not None:
            self.cost = Decimal(str(data["cost"]))

    @property
    def eta_seconds(self) -> float | None:
        if self.total_steps is None or self.seconds_per_step is None:
            return None
        return max(0, self.total_steps - self.step) * self.seconds_per_step

    def line(self) -> str:
        """Loss, speed, time left, cost; before the first step, what it is doing."""
        if not self.step:
            first = self.state == "running" and self.has_validation and self.held_out_loss is None
            return "evaluating before training" if first else ""
        parts = [
            f"loss {_number(self.loss, '.3f')}",
            f"{_number(self.tokens_per_second, ',.0f')} tok/s",
            f"ETA {_duration(self.eta_seconds)}",
            f"${self.cost:.6f}" if self.cost < 1 else f"${self.cost:,.2f}",
        ]
        return "  ".join(parts)


class JobProgress:
    """A bar with step, loss, tokens/s, ETA and cost; where there is no terminal, a plain line now and then."""

    def __init__(self, console: Console | None = None, *, label: str = "") -> None:
        self.view = JobView()
        self._console = console or Console(stderr=True, soft_wrap=True)
        self._label = label
        self._bar: Progress | None = None
        self._task: TaskID | None = None
        self._told = 0
        if self._console.is_terminal:
            self._bar = Progress(
                TextColumn("[bold]{task.description}"),
                BarColumn(bar_width=None),
                TextColumn("{task.fields[steps]}"),
                TextColumn("[cyan]{task.fields[line]}"),
                console=self._console,
                refresh_per_second=8,
                expand=True,
                redirect_stdout=_shares_the_screen(),
            )
            self._task = self._bar.add_task(self._title(), total=None, steps="", line="")

    def __enter__(self) -> Self:
        if self._bar is not None:
            self._bar.start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if self._bar is not None:
            self._bar.stop()

    def __call__(self, event: Event) -> None:
        """Show one event: the `on_event` of `jobs.wait`."""
        news = self.view.take(event)
        if self._bar is not None and self._task is not None:
            self._bar.update(
                self._task,
                description=self._title(),
                completed=self.view.step,
                total=self.view.total_steps,
                steps=self._steps(),
                line=self.view.line(),
            )
        elif event.type == "metric":
            self._tell()
        if news is not None:
            style = "bold yellow" if event.type == "warning" else "default"
            time = f"[dim]{event.created_at.astimezone():%H:%M:%S}[/dim]"
            self._console.print(f"{time}  [{style}]{escape(news)}[/{style}]", highlight=False)

    def _steps(self) -> str:
        total = self.view.total_steps
        return f"{self.view.step}/{total if total is not None else '?'}"

    def _title(self) -> str:
        return f"{escape(self._label)} {self.view.state}".strip()

    def _tell(self) -> None:
        step, total = self.view.step, self.view.total_steps
        if self._told == 0 or step == total or step >= self._told + max(1, (total or 0) // _PLAIN_LINES):
            self._told = step
            self._console.print(f"step {self._steps()}  {self.view.line()}", highlight=False)


class TransferProgress:
    """A bar for bytes: pass it as `on_progress`. Silent where there is no terminal.

    `after`: what goes on once all bytes are over, such as the server's check of an upload.
    """

    def __init__(self, label: str, console: Console | None = None, *, after: str = "") -> None:
        self._label, self._after = escape(label), escape(after)
        self._bar = Progress(
            TextColumn("[bold]{task.description}"),
            BarColumn(),
            DownloadColumn(),
            TransferSpeedColumn(),
            TimeRemainingColumn(),
            console=console or Console(stderr=True),
            disable=not (console or Console(stderr=True)).is_terminal,
            redirect_stdout=_shares_the_screen(),
        )
        self._task = self._bar.add_task(self._label, total=None)

    def __enter__(self) -> Self:
        self._bar.start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._bar.stop()

    def __call__(self, done: int, total: int) -> None:
        over = f"{self._label}, {self._after}" if self._after and done >= total else self._label
        self._bar.update(self._task, description=over, completed=done, total=total)


def _shares_the_screen() -> bool:
    """What is printed meanwhile goes above the bar; but only to a terminal, never what was meant for a file or pipe."""
    return sys.stdout is not None and sys.stdout.isatty()


def _average(old: float | None, new: float | None) -> float | None:
    if new is None:
        return old
    return new if old is None else old + _SMOOTH * (new - old)


def _number(value: float | None, style: str) -> str:
    return "–" if value is None else format(value, style)


def _duration(seconds: float | None) -> str:
    if seconds is None:
        return "–"
    minutes, rest = divmod(round(seconds), 60)
    hours, minutes = divmod(minutes, 60)
    return f"{hours}:{minutes:02}:{rest:02}" if hours else f"{minutes}:{rest:02}"
