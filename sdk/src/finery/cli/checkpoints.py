"""`finery checkpoints`"""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from finery.cli.output import AsJson, client, err, number, print_json, print_table, size
from finery.client import Finery
from finery.progress import TransferProgress
from finery.types.checkpoints import Checkpoint

app = typer.Typer(no_args_is_help=True)


@app.command("list")
def list_(
    job: Annotated[str | None, typer.Option(help="Only those of this job.")] = None, json: AsJson = False
) -> None:
    """Oldest first."""
    with client() as finery:
        found = list(finery.checkpoints.list(job=job))
    if json:
        print_json(found)
        return
    rows = ((c.id, c.job, c.step, _marks(c), _held_out(c), c.kind, size(c.bytes), c.created_at) for c in found)
    print_table(("id", "job", "step", "", "held-out", "kind", "size", "created"), rows)


@app.command()
def download(
    checkpoint: Annotated[str, typer.Argument(metavar="CHECKPOINT", help="Its id, or a job's id for its last one.")],
    best: Annotated[bool, typer.Option("--best", help="Of a job: the one that evaluated best.")] = False,
    to: Annotated[Path | None, typer.Option(file_okay=False, help="Folder; by default ./CHECKPOINT.")] = None,
    json: AsJson = False,
) -> None:
    """Fetch all files and prove their sha256; run it again after an interruption and it goes on."""
    with client() as finery:
        found = _find(finery, checkpoint, best)
        with TransferProgress(f"checkpoint of step {found.step}", err) as progress:
            folder = finery.checkpoints.download(found, to or Path(found.id), on_progress=progress)
    if json:
        print_json(found)
    else:
        err.print(f"{len(found.files)} files, {size(found.bytes)}, sha256 verified")
        typer.echo(str(folder))


@app.command()
def delete(
    checkpoints: Annotated[list[str], typer.Argument(metavar="CHECKPOINT...", help="Ids.")],
) -> None:
    """Delete for good; refused while a job needs it."""
    with client() as finery:
        for checkpoint in checkpoints:
            finery.checkpoints.delete(checkpoint)
            err.print(f"{checkpoint} deleted", markup=False, highlight=False)


def _marks(checkpoint: Checkpoint) -> str:
    return " ".join(name for name, is_so in (("★ best", checkpoint.best), ("final", checkpoint.final)) if is_so)


def _held_out(checkpoint: Checkpoint) -> str | None:
    """`loss 3.25` or `reward 0.5`."""
    known = (("loss", checkpoint.validation_loss), ("reward", checkpoint.validation_reward))
    return next((f"{what} {number(value)}" for what, value in known if value is not None), None)


def _find(finery: Finery, id_: str, best: bool) -> Checkpoint:
    if not id_.startswith("job_"):
        if best:
            raise typer.BadParameter(f"expected a job's id with --best, found {id_!r}")
        return finery.checkpoints.retrieve(id_)
    if best:
        return finery.checkpoints.best(id_)
    found = list(finery.checkpoints.list(job=id_))
    if not found:
        raise typer.BadParameter(f"job {id_} has no checkpoint yet")
    return found[-1]
