"""Live progress of jobs and transfers. `JobProgress` needs nothing but a job's events.

with JobProgress() as progress:
    client.jobs.wait(job.id, on_event=progress)

`job.stream()` and `job.wait(progress=True)` do that by themselves.
"""

from __future__ import annotations

import sys
from types import TracebackType
from typing import Self

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

from finery._job_view import JobView
from finery._visible import lines, one_line
from finery.types.jobs import Event

__all__ = ["JobProgress", "JobView", "TransferProgress"]

_LABEL = 80  # characters of a name in front of a bar
_PLAIN_LINES = 20  # lines about steps where no terminal shows a bar


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
            self._console.print(f"{time}  [{style}]{escape(lines(news))}[/{style}]", highlight=False)

    def _steps(self) -> str:
        total = self.view.total_steps
        return f"{self.view.step}/{total if total is not None else '?'}"

    def _title(self) -> str:
        return f"{escape(one_line(self._label, _LABEL))} {self.view.state}".strip()

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
        self._label, self._after = escape(one_line(label, _LABEL)), escape(after)
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
