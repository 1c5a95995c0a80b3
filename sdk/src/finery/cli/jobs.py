"""`finery jobs`"""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, Any, cast

import typer

from finery.cli import spec as specs
from finery.cli.environments import Reward, of_job
from finery.cli.files import Limit, file_id
from finery.cli.output import AsJson, client, err, out, print_details, print_json, print_table, safe, summary, text
from finery.cli.report import print_job, print_rollouts, steps
from finery.cli.usage import Time
from finery.client import Finery
from finery.errors import FineryError, JobFailedError
from finery.forward import SINKS, Sink
from finery.progress import JobProgress
from finery.types.jobs import Job
from finery.types.rollouts import RolloutKind

app = typer.Typer(no_args_is_help=True)
JobId = Annotated[str, typer.Argument(metavar="JOB", help="Its id.")]
Data = Annotated[str | None, typer.Option(metavar="FILE", help="Training file: an id, or a path to upload.")]
Held = Annotated[str | None, typer.Option(metavar="FILE", help="Held-out file: an id, or a path to upload.")]
Set = Annotated[
    list[str] | None,
    typer.Option(
        metavar="NAME=VALUE",
        help="A hyper-parameter (learning_rate=3e-4), or any field (adapter.rank=8).",
    ),
]
Spec = Annotated[
    Path | None, typer.Option(exists=True, dir_okay=False, help="The whole job as JSON; other options override it.")
]
Wait = Annotated[bool, typer.Option("--wait", help="Watch it to the end; exits with 1 if it does not succeed.")]


@app.command()
def create(
    method: Annotated[
        str | None, typer.Option(help="How to train: sft, dpo or rl. Required, here or in --spec.")
    ] = None,
    model: Annotated[str | None, typer.Option(help="Base model, by name or id.")] = None,
    from_checkpoint: Annotated[str | None, typer.Option(help="Start here instead of at a base model.")] = None,
    file: Data = None,
    validation_file: Held = None,
    environment: Annotated[
        str | None, typer.Option(metavar="ENVIRONMENT", help="RL: an id, or the path of a spec as JSON.")
    ] = None,
    reward_file: Reward = None,
    name: Annotated[str | None, typer.Option(help="For people.")] = None,
    seed: Annotated[int | None, typer.Option()] = None,
    set: Set = None,  # noqa: A002 (the option's name)
    spec: Spec = None,
    wait: Wait = False,
    json: AsJson = False,
) -> None:
    """Submit a job."""
    given = {"method": method, "model": model, "from_checkpoint": from_checkpoint, "name": name, "seed": seed}
    with client() as finery:
        body = _body(spec, {key: value for key, value in given.items() if value is not None}, set or [])
        of_job(body, environment, reward_file)
        for field, source in (("training_file", file), ("validation_file", validation_file)):
            if source is not None:
                body[field] = file_id(finery, source)
        job = finery.jobs.create(**body)
        if not wait:
            print_job(job, json)
            err.print(f"[dim]Watch it: finery jobs watch {job.id}[/dim]")
            return
        err.print(f"{job.id} submitted")
        _end(_watch(finery, job, quiet=json), json)


@app.command("list")
def list_(
    state: Annotated[list[str] | None, typer.Option(help="Only jobs in this state; repeat it for more.")] = None,
    method: Annotated[str | None, typer.Option(help="Only this method, as in sft.")] = None,
    project: Annotated[str | None, typer.Option(help="Only this project, by its id.")] = None,
    created_after: Time = None,
    created_before: Time = None,
    limit: Limit = 20,
    json: AsJson = False,
) -> None:
    """Newest first. Times: a day (UTC) or a time with a zone."""
    times = {"created_after": created_after, "created_before": created_before}
    with client() as finery:
        found = finery.jobs.list(state=state, method=method, project=project, **times, limit=min(limit, 100))
        jobs = [job for job, _ in zip(found, range(limit), strict=False)]
    if json:
        print_json(jobs)
        return
    rows = ((job.id, job.name, job.method, job.model, job.state, steps(job), job.cost, job.created_at) for job in jobs)
    print_table(("id", "name", "method", "model", "state", "step", "cost", "created"), rows)


@app.command()
def get(job: JobId, json: AsJson = False) -> None:
    """State, progress, usage and cost."""
    with client() as finery:
        found = finery.jobs.retrieve(job)
    print_job(found, json)
    if found.error is not None and not json:
        print_details(JobFailedError(found), found.error.message)


@app.command()
def cancel(job: JobId, json: AsJson = False) -> None:
    """End a job; a running one stores a checkpoint first."""
    with client() as finery:
        print_job(finery.jobs.cancel(job), json)


@app.command()
def pause(job: JobId, json: AsJson = False) -> None:
    """Let a job rest: it stores a checkpoint and gives its accelerators back."""
    with client() as finery:
        print_job(finery.jobs.pause(job), json)


@app.command()
def resume(job: JobId, json: AsJson = False) -> None:
    """Let a paused job go on."""
    with client() as finery:
        print_job(finery.jobs.resume(job), json)


@app.command()
def rollouts(
    job: JobId,
    step: Annotated[int | None, typer.Option(help="Only this step.", min=0)] = None,
    kind: Annotated[str, typer.Option(help="train, or eval.")] = "train",
    limit: Limit = 20,
    json: AsJson = False,
) -> None:
    """What an RL job sampled and how it was rewarded; oldest first, whole with --json."""
    with client() as finery:
        found = finery.jobs.rollouts(job, step, kind=cast(RolloutKind, kind), limit=min(limit, 100))
        several = [one for one, _ in zip(found, range(limit), strict=False)]
    if json:
        print_json(several)
    elif several:
        print_rollouts(several)
    else:
        err.print("No rollouts of that kind yet; only RL jobs have some.")


@app.command()
def plot(
    jobs: Annotated[list[str], typer.Argument(metavar="JOB...", help="One job, or several to compare.")],
    to: Annotated[Path, typer.Option(dir_okay=False, help="Where to, .png or .svg.")] = Path("loss.png"),
) -> None:
    """Draw losses (of RL: rewards), learning rate and best checkpoint."""
    try:
        with client() as finery:
            finery.jobs.plot(*jobs, path=to)
    except (ValueError, ImportError) as error:
        raise typer.BadParameter(str(error)) from None
    typer.echo(str(to))


@app.command()
def forward(
    job: JobId,
    to: Annotated[str, typer.Option(metavar="TRACKER", help="tensorboard, wandb or mlflow.")],
    dir: Annotated[  # noqa: A002 (the option's name)
        Path | None, typer.Option(file_okay=False, help="TensorBoard: the folder of all runs; W&B: its own files.")
    ] = None,
    project: Annotated[str | None, typer.Option(help="W&B project, or MLflow experiment.")] = None,
    uri: Annotated[str | None, typer.Option(help="MLflow's tracking server.")] = None,
    after: Annotated[int, typer.Option(help="Only what comes behind this event.", min=0)] = 0,
    json: AsJson = False,
) -> None:
    """Send a job's metrics to a tracker, from the start until the job ends."""
    sink = _sink(to, dir, project, uri)
    try:
        with client() as finery:
            print_job(finery.jobs.forward(job, to=sink, after=after), json)
        if to == "tensorboard":
            err.print(f"See it: tensorboard --logdir {dir or 'runs'}", markup=False, highlight=False)
    except ImportError as error:
        err.print(f"[bold red]Error:[/bold red] {safe(str(error))}", highlight=False)
        raise typer.Exit(2) from None
    except KeyboardInterrupt as error:
        err.print("\n".join(getattr(error, "__notes__", ["Nothing was forwarded."])), markup=False)
        raise typer.Exit(130) from None
    except FineryError:
        raise
    except Exception as error:  # whatever the tracker's library raises
        err.print("\n".join([f"Error: {to}: {error}", *getattr(error, "__notes__", [])]), markup=False, highlight=False)
        raise typer.Exit(1) from None


@app.command()
def events(
    job: JobId,
    after: Annotated[int, typer.Option(help="Only what comes behind this number.", min=0)] = 0,
    follow: Annotated[bool, typer.Option("--follow", "-f", help="Go on until the job ends.")] = False,
    json: AsJson = False,
) -> None:
    """Its history, one event a line (with --json, one JSON object a line)."""
    with client() as finery:
        history = (
            finery.jobs.stream(job, after=after, progress=False) if follow else finery.jobs.events(job, after=after)
        )
        for event in history:
            if json:
                typer.echo(event.model_dump_json())
            else:
                line = f"{event.seq:>5}  {text(event.created_at)}  {event.type:<10}  {summary(event)}"
                out.print(safe(line), highlight=False)


@app.command()
def watch(job: JobId, json: AsJson = False) -> None:
    """A live progress bar until the job ends; exits with 1 if it does not succeed."""
    with client() as finery:
        _end(_watch(finery, finery.jobs.retrieve(job), quiet=json), json)


def _watch(finery: Finery, job: Job, *, quiet: bool) -> Job:
    try:
        if quiet:
            return finery.jobs.wait(job, raise_on_failure=False)
        with JobProgress(err, label=job.name or job.method) as progress:
            return finery.jobs.wait(job, on_event=progress, raise_on_failure=False)
    except KeyboardInterrupt:
        err.print(f"The job goes on. Watch it again: finery jobs watch {job.id}; end it: finery jobs cancel {job.id}")
        raise typer.Exit(130) from None


def _end(job: Job, as_json: bool) -> None:
    """Print the ended job; a failure is raised too, and so its reason is printed."""
    print_job(job, as_json)
    if job.state != "succeeded":
        raise JobFailedError(job)


def _body(spec: Path | None, given: dict[str, Any], assignments: list[str]) -> dict[str, Any]:
    try:
        body = {**(specs.load(spec) if spec else {}), **given}
        for assignment in assignments:
            specs.assign(body, assignment)
    except ValueError as error:
        raise typer.BadParameter(str(error)) from None
    return body


def _sink(name: str, folder: Path | None, project: str | None, uri: str | None) -> Sink:
    given: dict[str, dict[str, Any]] = {
        "tensorboard": {"folder": folder or Path("runs")},
        "wandb": {"project": project, "dir": str(folder) if folder else None},
        "mlflow": {"uri": uri, "experiment": project},
    }
    if name not in SINKS:
        raise typer.BadParameter(f"expected --to {', '.join(SINKS)}, found {name!r}")
    return SINKS[name](**{key: value for key, value in given[name].items() if value is not None})
