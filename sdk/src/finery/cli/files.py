"""`finery files`"""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from finery.cli.output import AsJson, client, err, print_facts, print_json, print_table, problem, size
from finery.client import Finery
from finery.progress import TransferProgress
from finery.types.files import File

app = typer.Typer(no_args_is_help=True)
Limit = Annotated[int, typer.Option(help="At most so many.", min=1)]


@app.command()
def upload(
    path: Annotated[Path, typer.Argument(exists=True, dir_okay=False, help="A JSONL file of conversations.")],
    name: Annotated[str | None, typer.Option(help="Another name than the file's own.")] = None,
    json: AsJson = False,
) -> None:
    """Upload a data set; exits with 1 if rows are wrong."""
    with client() as finery:
        file = send(finery, path, name)
    if json:
        print_json(file)
    else:
        show(file)
    if file.status == "invalid":
        raise typer.Exit(1)


@app.command("list")
def list_(limit: Limit = 20, json: AsJson = False) -> None:
    """Newest first."""
    with client() as finery:
        files = [file for file, _ in zip(finery.files.list(limit=min(limit, 100)), range(limit), strict=False)]
    if json:
        print_json(files)
    else:
        rows = ((file.id, file.name, file.status, file.rows, size(file.bytes), file.created_at) for file in files)
        print_table(("id", "name", "status", "rows", "size", "created"), rows)


@app.command()
def get(file: str, json: AsJson = False) -> None:
    """One file and what is wrong with it."""
    with client() as finery:
        found = finery.files.retrieve(file)
    if json:
        print_json(found)
    else:
        show(found)


def send(finery: Finery, path: Path, name: str | None = None) -> File:
    """Upload with a bar."""
    with TransferProgress(path.name, err) as progress:
        return finery.files.upload(path, name=name, on_progress=progress)


def show(file: File) -> None:
    facts = [
        ("id", file.id),
        ("name", file.name),
        ("status", file.status),
        ("format", file.format),
        ("rows", file.rows),
    ]
    print_facts([*facts, ("size", size(file.bytes)), ("sha256", file.sha256), ("created", file.created_at)])
    for fault in file.errors[:10]:
        err.print(f"  {problem(fault.line, fault.path, fault.model_dump())}", style="red", markup=False)
    if file.error_count > 10:
        err.print(f"  and {file.error_count - 10} more; finery files get {file.id} --json", style="red")
