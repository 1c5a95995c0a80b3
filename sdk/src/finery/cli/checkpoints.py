"""`finery checkpoints`"""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from finery.cli.output import AsJson, client, err, print_json, print_table, size
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
    rows = ((c.id, c.job, c.step, "yes" if c.final else "", len(c.files), size(c.bytes), c.created_at) for c in found)
    print_table(("id", "job", "step", "final", "files", "size", "created"), rows)


@app.command()
def download(
    checkpoint: Annotated[str, typer.Argument(metavar="CHECKPOINT", help="Its id, or a job's id for its last one.")],
    to: Annotated[Path | None, typer.Option(file_okay=False, help="Folder; by default ./CHECKPOINT.")] = None,
    json: AsJson = False,
) -> None:
    """Fetch all files and prove their sha256; run it again after an interruption and it goes on."""
    with client() as finery:
        found = _find(finery, checkpoint)
        with TransferProgress(found.id, err) as progress:
            folder = finery.checkpoints.download(found, to or Path(found.id), on_progress=progress)
    if json:
        print_json(found)
    else:
        err.print(f"{len(found.files)} files, {size(found.bytes)}, sha256 verified")
        typer.echo(str(folder))


def _find(finery: Finery, id_: str) -> Checkpoint:
    if not id_.startswith("job_"):
        return finery.checkpoints.retrieve(id_)
    found = list(finery.checkpoints.list(job=id_))
    if not found:
        raise typer.BadParameter(f"job {id_} has no checkpoint yet")
    return found[-1]
