"""`finery models`"""

from __future__ import annotations

import typer

from finery.cli.output import AsJson, client, print_json, print_table

app = typer.Typer(no_args_is_help=True)


@app.callback()
def root() -> None:
    """Base models that jobs may start from."""


@app.command("list")
def list_(json: AsJson = False) -> None:
    """Base models, their limits, and US dollars per million units."""
    with client() as finery:
        models = list(finery.models.list(limit=100))
    if json:
        print_json(models)
        return
    rows = ((m.name, ", ".join(m.methods), m.max_length, m.parameters, m.prices) for m in models)
    print_table(("name", "methods", "max length", "parameters", "prices"), rows)
