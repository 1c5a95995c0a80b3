"""The commands, put together; and how errors end them."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Annotated

import typer

from finery.cli import checkpoints, environments, files, jobs, models, usage
from finery.cli.output import err, print_error, safe
from finery.errors import ConfigurationError, FineryError, InvalidArgumentError

app = typer.Typer(
    no_args_is_help=True,
    pretty_exceptions_enable=False,
    help="Post-training jobs: upload data, train, watch, download. Reads FINERY_BASE_URL and FINERY_API_KEY.",
)
app.add_typer(files.app, name="files", help="Data sets.")
app.add_typer(environments.app, name="environments", help="Prompts, and what rewards an answer.")
app.add_typer(jobs.app, name="jobs", help="Training jobs.")
app.add_typer(checkpoints.app, name="checkpoints", help="What jobs leave behind.")
app.add_typer(models.app, name="models", help="Base models.")
app.command("usage")(usage.usage)


def _version(wanted: bool) -> None:
    if wanted:
        from importlib.metadata import version

        typer.echo(version("finery"))
        raise typer.Exit


Version = Annotated[bool, typer.Option("--version", callback=_version, is_eager=True, help="Print it and exit.")]


@app.callback()
def root(version: Version = False) -> None:
    """Post-training jobs from the command line."""


def run(arguments: Sequence[str] | None) -> int:
    """The exit code: 0 done, 1 the server refused or the job failed, 2 wrong usage."""
    try:
        app(args=None if arguments is None else list(arguments), prog_name="finery")
    except (ConfigurationError, InvalidArgumentError) as error:
        print_error(error)
        return 2
    except FineryError as error:
        print_error(error)
        return 1
    except OSError as error:
        err.print(f"[bold red]Error:[/bold red] {safe(str(error))}", highlight=False)
        return 1
    except SystemExit as done:
        return done.code if isinstance(done.code, int) else 0 if done.code is None else 1
    return 0
