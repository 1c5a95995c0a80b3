"""Whether and how a job's events are drawn while somebody else reads them."""

from __future__ import annotations

import sys
from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from importlib.util import find_spec

from finery.types.jobs import Event, Job

Show = Callable[[Event], object]


def display(wanted: bool | None, label: str) -> AbstractContextManager[Show]:
    """What to call with every event. None draws if stderr is a terminal and rich is there; never to stdout."""
    if wanted is None:
        wanted = sys.stderr is not None and sys.stderr.isatty() and find_spec("rich") is not None
    if not wanted:
        return nullcontext(_ignore)
    try:
        from finery.progress import JobProgress
    except ImportError as error:
        raise ImportError('progress needs rich; run: pip install "finery[cli]"') from error
    return JobProgress(label=label)


def label_of(job: Job | str) -> str:
    return job if isinstance(job, str) else job.name or job.id


def both(show: Show, on_event: Show | None) -> Show:
    """One callback that shows an event and hands it on; async where `on_event` is."""

    def call(event: Event) -> object:
        show(event)
        return on_event(event) if on_event is not None else None

    return call


def _ignore(event: Event) -> None:
    """Draws nothing."""
