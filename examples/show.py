"""What the parts of the demo share: the system on this machine, following a job, its bill, and what must add up."""

from __future__ import annotations

import hashlib
import os
import shutil
import signal
import sys
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from decimal import Decimal
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.markup import escape
from rich.table import Table

from finery import Finery
from finery.progress import JobProgress
from finery.types.checkpoints import Checkpoint
from finery.types.jobs import Event, Job
from finery.types.usage import UsageRow
from finery_testing.stack import Stack

MODEL = "smollm2-135m-instruct"
PATIENCE = 1800  # seconds for a job

console = Console()


def say(what: str, more: str) -> None:
    console.print(f"[bold green]{what:>13}[/] {escape(more)}", highlight=False, soft_wrap=True)


def home(out: Path) -> Path:
    """The home folder in `out`; as root only if PostgreSQL's unprivileged user may go there."""
    if os.geteuid() != 0 or all(folder.stat().st_mode & 0o001 for folder in (out, *out.parents)):
        return out / "home"
    return Path("/var/tmp/finery-demo")  # noqa: S108 root's; `up` checks that it is


@contextmanager
def running(folder: Path) -> Iterator[Stack]:
    """The whole system; it must stop by itself when asked to, and does so whatever ends us (kill -9 excepted)."""
    signal.signal(signal.SIGTERM, lambda *_: sys.exit("stopped by SIGTERM"))
    stack = Stack(folder, tenant="demo", torch_threads=None)
    try:
        stack.start(timeout=180)
        yield stack
    except BaseException:
        stack.stop()
        raise
    if (code := stack.stop()) != 0:
        raise RuntimeError(f"expected `finery-service up` to end with 0, found {code}; see {stack.home}/logs")


@dataclass(frozen=True)
class Finished:
    """A job at its end, and all that is known of it."""

    job: Job
    events: list[Event]
    checkpoint: Checkpoint
    folder: Path
    """Its last checkpoint, downloaded."""
    rows: Sequence[UsageRow]

    def of(self, kind: str) -> list[dict[str, Any]]:
        """The data of the events of a type."""
        return [event.data for event in self.events if event.type == kind]


def finish(client: Finery, job: Job, out: Path) -> Finished:
    """Follows the job with a live progress bar, downloads its last checkpoint, shows its bill."""
    say("Submitted", f"{job.id}, method {job.method}")
    events: list[Event] = []
    with JobProgress(console=console) as progress:

        def on_event(event: Event) -> None:
            events.append(event)
            progress(event)

        job = client.jobs.wait(job.id, timeout=PATIENCE, on_event=on_event)
    (*_, last) = client.checkpoints.list(job=job.id)
    folder = out / f"checkpoint-{job.method}"
    shutil.rmtree(folder, ignore_errors=True)  # of an earlier demo
    client.checkpoints.download(last.id, folder)
    say("Checkpoint", f"{last.id}, step {last.step}, {last.bytes / 1e6:.1f} MB, every sha256 verified: {folder}")
    rows = list(client.usage.list(job=job.id, group_by=["sku"]))
    return Finished(job, events, last, folder, rows)


def bill(client: Finery, finished: Finished) -> Table:
    prices = client.models.retrieve(MODEL).prices
    table = Table("SKU", "units", "USD per million", "USD", title=f"The bill of {finished.job.method}")
    for row in finished.rows:
        table.add_row(row.sku, f"{row.billable:,}", prices.get(row.sku or "", "?"), f"{row.cost:f}")
    table.add_row("total", "", "", f"{sum((row.cost for row in finished.rows), Decimal(0)):f}", style="bold")
    return table


def discrepancies(finished: Finished, checks: dict[str, bool]) -> list[str]:
    """Everything that a customer could check by hand and that is not so; `checks` are the method's own."""
    job, events, metrics = finished.job, finished.events, finished.of("metric")
    sku = f"train.{job.method}"
    bought = {row.sku: row.billable for row in finished.rows}
    checks = {
        "the job succeeded": job.state == "succeeded",
        "the history has no gap": [event.seq for event in events] == list(range(1, len(events) + 1)),
        "every step is there once": [one["step"] for one in metrics] == list(range(1, job.progress.step + 1)),
        "all steps were done": job.progress.step == job.progress.total_steps,
        "the trained tokens of the steps are those of the bill": sum(one["trained_tokens"] for one in metrics)
        == bought.get(sku)
        == job.progress.trained_tokens,
        "the tokens of the evaluations are those of the bill": sum(one["tokens"] for one in finished.of("eval"))
        == bought.get(f"eval.{job.method}", 0),
        "nothing is left provisional": not any(row.provisional for row in finished.rows),
        "the bill is the job's cost": sum((row.cost for row in finished.rows), Decimal(0)) == job.cost > 0,
        "the last checkpoint is the final one": finished.checkpoint.final
        and finished.checkpoint.step == job.progress.step,
        "the downloaded files are those of the manifest": all(
            hashlib.sha256((finished.folder / file.path).read_bytes()).hexdigest() == file.sha256
            for file in finished.checkpoint.files
        ),
    } | checks
    return [f"{job.method}: expected that {name}" for name, holds in checks.items() if not holds]
