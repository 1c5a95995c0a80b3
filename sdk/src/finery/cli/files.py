"""`finery files`"""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, Any

import typer
from pydantic import TypeAdapter

from finery.cli.output import AsJson, client, err, print_facts, print_json, print_table, problem, safe, size
from finery.client import Finery
from finery.data.check import Report, check_file
from finery.progress import TransferProgress
from finery.types.files import File

app = typer.Typer(no_args_is_help=True)
Limit = Annotated[int, typer.Option(help="At most so many.", min=1)]


@app.command()
def upload(
    path: Annotated[Path, typer.Argument(exists=True, dir_okay=False, help="A data set: JSONL or parquet.")],
    name: Annotated[str | None, typer.Option(help="Another name than the file's own.")] = None,
    project: Annotated[str | None, typer.Option(help="Another project than the key's, by its id.")] = None,
    json: AsJson = False,
) -> None:
    """Upload a data set; exits with 1 if rows are wrong."""
    with client() as finery:
        file = send(finery, path, name, project)
    if json:
        print_json(file)
    else:
        show(file)
    if file.status == "invalid":
        raise typer.Exit(1)


@app.command()
def check(
    path: Annotated[Path, typer.Argument(exists=True, dir_okay=False, help="A data set: JSONL or parquet.")],
    json: AsJson = False,
) -> None:
    """What an upload would be told, without one: needs no server and no key. Exits with 1 if rows are wrong."""
    try:
        with TransferProgress(path.name, err) as progress:
            report = check_file(path, progress)
    except ImportError as error:
        err.print(str(error), markup=False)
        raise typer.Exit(2) from None
    if json:
        typer.echo(TypeAdapter(Report).dump_json(report, indent=2))
    else:
        show_report(report)
    if report.status == "invalid":
        raise typer.Exit(1)


@app.command("list")
def list_(
    project: Annotated[str | None, typer.Option(help="Only this project, by its id.")] = None,
    limit: Limit = 20,
    json: AsJson = False,
) -> None:
    """Newest first."""
    with client() as finery:
        found = finery.files.list(project=project, limit=min(limit, 100))
        files = [file for file, _ in zip(found, range(limit), strict=False)]
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


@app.command()
def preview(
    file: Annotated[str, typer.Argument(metavar="FILE", help="An id, or a path to upload.")],
    model: Annotated[str, typer.Option(help="Base model, by name or id.")],
    train_on: Annotated[str | None, typer.Option(help="assistant, last, completion or all.")] = None,
    max_length: Annotated[int | None, typer.Option(help="Tokens of a row.")] = None,
    truncation: Annotated[str | None, typer.Option(help="right, left, drop or error.")] = None,
    added_token: Annotated[list[str] | None, typer.Option(help="A special token to add; repeat it for more.")] = None,
    first_line: Annotated[int | None, typer.Option(help="The first row's line.", min=1)] = None,
    rows: Annotated[int | None, typer.Option(help="How many rows.", min=1, max=50)] = None,
    html: Annotated[Path | None, typer.Option(dir_okay=False, help="Write a page instead of printing.")] = None,
    json: AsJson = False,
) -> None:
    """Rows as the model would be trained on them, the trained tokens marked."""
    with client() as finery:
        options: dict[str, Any] = {"train_on": train_on, "truncation": truncation}  # the server knows which there are
        cut: dict[str, Any] = {"max_length": max_length, "first_line": first_line, "rows": rows}
        known = file_id(finery, file)
        with err.status("waiting for a worker"):
            found = finery.files.preview(known, model=model, added_tokens=added_token, **options, **cut)
    if html is not None:
        html.write_text(found.html(), encoding="utf-8")
        err.print(f"{html} written", markup=False, highlight=False)
    if json:
        print_json(found)
    elif html is None:
        typer.echo(found.text(), color=True)


@app.command()
def delete(files: Annotated[list[str], typer.Argument(metavar="FILE...", help="Ids.")]) -> None:
    """Delete for good; refused while a job needs it."""
    with client() as finery:
        for file in files:
            finery.files.delete(file)
            err.print(f"{file} deleted", markup=False, highlight=False)


def send(finery: Finery, path: Path, name: str | None = None, project: str | None = None) -> File:
    """Upload with a bar."""
    with TransferProgress(path.name, err, after="the server checks its rows") as progress:
        return finery.files.upload(path, name=name, project=project, on_progress=progress)


def file_id(finery: Finery, source: str) -> str:
    """An id as it is; a path is uploaded, and its id told, so that nobody need upload it again."""
    path = Path(source)
    if not path.is_file():
        if source.startswith("file_"):
            return source
        raise typer.BadParameter(f"expected the id of a file or the path of one, found {source!r}")
    file = send(finery, path)
    if file.status == "invalid":
        show(file)
        raise typer.Exit(1)
    err.print(f"{path.name} uploaded as {file.id}", markup=False, highlight=False)
    return file.id


def show_report(report: Report) -> None:
    kind = " ".join(part for part in (report.format, report.encoding) if part)
    print_facts([("status", report.status), ("format", kind), ("rows", report.rows), ("errors", report.problem_count)])
    if report.problems:
        rows = [(fault.line, fault.path, fault.code, fault.message, fault.hint) for fault in report.problems]
        print_table(("line", "path", "code", "message", "hint"), rows)
    if report.problem_count > len(report.problems):
        err.print(f"and {report.problem_count - len(report.problems)} more", style="red")


def show(file: File) -> None:
    facts = [
        ("id", file.id),
        ("name", file.name),
        ("status", file.status),
        ("format", " ".join(part for part in (file.format, file.encoding) if part)),
        ("rows", file.rows),
    ]
    print_facts([*facts, ("size", size(file.bytes)), ("sha256", file.sha256), ("created", file.created_at)])
    for fault in file.errors[:10]:
        err.print(f"  {safe(problem(fault.line, fault.path, fault.model_dump()))}", style="red")
    if file.error_count > 10:
        err.print(f"  and {file.error_count - 10} more; finery files get {file.id} --json", style="red")
