"""`finery usage`"""

from __future__ import annotations

from datetime import UTC, datetime
from typing import Annotated, cast

import typer

from finery.cli.output import AsJson, client, print_json, print_table
from finery.types.usage import GroupBy


def _time(text: str) -> datetime:
    try:
        found = datetime.fromisoformat(text)
    except ValueError:
        raise typer.BadParameter(f"expected a day (2026-11-30, UTC) or a time with a zone, found {text!r}") from None
    if found.tzinfo is None and len(text) > 10:
        raise typer.BadParameter(f"expected a time with a zone, as in {text}Z, found {text!r}")
    return found if found.tzinfo else found.replace(tzinfo=UTC)


Time = Annotated[datetime | None, typer.Option(parser=_time, metavar="TIME")]


def usage(
    job: Annotated[str | None, typer.Option(help="Only this job.")] = None,
    start: Time = None,
    end: Time = None,
    group_by: Annotated[list[str] | None, typer.Option(help="job, sku or day; repeat it for more than one.")] = None,
    json: AsJson = False,
) -> None:
    """What was used and what it costs, in [START, END): a day (UTC) or a time with a zone."""
    groups = cast(list[GroupBy], group_by or ["sku"])  # the server knows which there are
    with client() as finery:
        rows = finery.usage.list(job=job, start=start, end=end, group_by=groups)
    if json:
        print_json(rows)
        return
    columns = (*groups, "units", "billable", "provisional", "void", "cost")
    cells = (
        (*(getattr(row, g) for g in groups), row.quantity, row.billable, row.provisional, row.void, row.cost)
        for row in rows
    )
    print_table(columns, cells)
