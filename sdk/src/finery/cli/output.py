"""What the command prints: tables for people, JSON for programs, errors in one readable line."""

from __future__ import annotations

import json
import re
from collections.abc import Iterable, Sequence
from datetime import datetime
from decimal import Decimal
from typing import Annotated, Any

import typer
from pydantic import BaseModel
from rich.cells import cell_len, set_cell_size
from rich.console import Console
from rich.markup import escape
from rich.table import Table

from finery._job_view import brief, sample
from finery._visible import lines, visible
from finery.client import Finery
from finery.errors import APIError, AuthenticationError, FineryError, InternalServerError, JobFailedError, NotFoundError
from finery.types.jobs import Event
from finery.types.money import plain

AsJson = Annotated[bool, typer.Option("--json", help="Print JSON.")]

_ATTEMPT = ("attempt", "reason", "resumed_from_step")
_PREPARED = ("rows", "trained_tokens", "dropped_rows", "truncated_rows", "total_steps")
_METHODS = ("reward", "loss", "margin", "accuracy", "kl")
_METRICS = (*_METHODS, "trained_tokens", "tokens_per_second", "learning_rate", "grad_norm", "cost")
out = Console(soft_wrap=True)
err = Console(stderr=True, soft_wrap=True)


def client() -> Finery:
    return Finery()


def print_json(value: BaseModel | Iterable[BaseModel]) -> None:
    """One JSON document on stdout, never wrapped or coloured."""
    if isinstance(value, BaseModel):
        document: Any = value.model_dump(mode="json")
    else:
        document = [item.model_dump(mode="json") for item in value]
    typer.echo(json.dumps(document, indent=2, ensure_ascii=False))


def print_table(columns: Sequence[str], rows: Iterable[Sequence[object]]) -> None:
    """One row a line, whatever the width of the terminal: an id that is cut short is of no use."""
    table = [columns, *([visible(text(cell)).replace("\n", " ") for cell in cells] for cells in rows)]
    widths = [max(map(cell_len, column)) for column in zip(*table, strict=True)]
    for row, line in enumerate(table):
        padded = (set_cell_size(cell, width) for cell, width in zip(line, widths, strict=True))
        style = "bold" if row == 0 else None
        out.print("  ".join(padded).rstrip(), style=style, markup=False, highlight=False)


def print_facts(facts: Iterable[tuple[str, object]]) -> None:
    """Name and value, one a line; what is not known is left out."""
    table = Table.grid(padding=(0, 2))
    for name, value in facts:
        if value is not None:
            table.add_row(f"[bold]{name}[/bold]", safe(text(value)))
    out.print(table)


def safe(words: str) -> str:
    """Text of customers, models and their code between markup of ours: shown, never obeyed by rich or a terminal."""
    return escape(lines(words))


def text(value: object) -> str:
    if value is None:
        return "–"
    if isinstance(value, Decimal):
        return f"${plain(value)}"
    if isinstance(value, datetime):
        return value.astimezone().strftime("%Y-%m-%d %H:%M:%S")
    if isinstance(value, dict):
        return ", ".join(f"{key} {item}" for key, item in value.items()) or "–"
    return str(value)


def size(count: int) -> str:
    """Bytes for people: 1.5 MB."""
    value = float(count)
    for unit in ("B", "kB", "MB", "GB"):
        if value < 1000:
            return f"{value:.0f} {unit}" if unit == "B" else f"{value:.1f} {unit}"
        value /= 1000
    return f"{value:.1f} TB"


def summary(event: Event) -> str:
    """An event in one line."""
    data = event.data
    match event.type:
        case "state":
            return " ".join(brief(str(data[key])) for key in ("to", "message") if data.get(key))
        case "metric":
            return f"step {data.get('step')}/{data.get('total_steps', '?')}  {_named(data, _METRICS)}"
        case "eval":
            when = "before training" if data.get("step") == 0 else f"step {data.get('step')}"
            return f"{when}  {_evaluated(data)}"
        case "prepared":
            return _named({**data, "trained_tokens": data.get("trained_tokens") or None}, _PREPARED)
        case "checkpoint":
            said = f"step {data.get('step')}  {data.get('checkpoint')}" + ("  final" if data.get("final") else "")
            known = ((what, data.get(f"validation_{what}")) for what in ("loss", "reward"))
            return said + "".join(f"  held-out {what} {number(value)}" for what, value in known if value is not None)
        case "attempt":
            said = _named({**data, "resumed_from_step": data.get("resumed_from_step") or None}, _ATTEMPT)
            return f"{data.get('number', '?')} {data.get('phase', '')}  {said}".rstrip()
        case "warning":
            return brief(str(data.get("message", data.get("code"))))
        case "rollout":
            return f"step {data.get('step')}  {sample(data)}"
        case _:
            return _named(data, data)


def _evaluated(data: dict[str, Any]) -> str:
    """`held-out loss 3.94`, or for RL `held-out reward 0.5  reward_low 0.4  …`."""
    if "reward" not in data:
        return f"held-out loss {number(data.get('loss'))}  {_named(data, ('accuracy', 'margin'))}".rstrip()
    bounds = ("reward_low", "reward_high", *(name for name in data if re.fullmatch(r"pass_at_\d+", name)))
    return f"held-out reward {number(data['reward'])}  {_named(data, bounds)}".rstrip()


def _named(data: dict[str, Any], names: Iterable[str]) -> str:
    """`rows 64  total_steps 8`; what is nested is for --json."""
    known = ((name, data.get(name)) for name in names)
    return "  ".join(f"{name} {number(v)}" for name, v in known if v is not None and not isinstance(v, (dict, list)))


def number(value: object) -> str:
    """Four digits of a float, or all of those before its point; – where there is none."""
    if value is None:
        return "–"
    if not isinstance(value, float):
        return str(value)
    return f"{value:,.0f}" if 1000 <= abs(value) < 1e15 else f"{value:.4g}"


def print_error(error: FineryError) -> None:
    """One line, what else the server said, the request id, and what to do."""
    message = error.message if isinstance(error, APIError) else str(error)
    param = error.param if isinstance(error, APIError) else None
    where = f" [dim]({safe(param)})[/dim]" if param and not message.startswith(param) else ""
    err.print(f"[bold red]Error:[/bold red] {safe(message)}{where}", highlight=False)
    print_details(error, message)
    if isinstance(error, APIError) and error.request_id:
        err.print(f"[dim]{safe(str(error.code))}, request {safe(error.request_id)}[/dim]")
    if advice := _hint(error):
        err.print(f"[dim]Hint: {safe(advice)}[/dim]")


def print_details(error: FineryError, message: str) -> None:
    """What is wrong line by line, or field by field, beyond the message."""
    for detail in [detail for detail in details(error) if not message.startswith(detail.rstrip("."))][:10]:
        err.print(f"  {safe(detail)}", highlight=False)


def details(error: FineryError) -> list[str]:
    job_error = error.job.error if isinstance(error, JobFailedError) else None
    found = (error.details if isinstance(error, APIError) else job_error.details if job_error else None) or []
    return [problem(item.get("line"), str(item.get("path") or item.get("param") or ""), item) for item in found]


def problem(line: int | None, path: str, item: dict[str, Any]) -> str:
    place = " ".join(part for part in (f"line {line}" if line else "", path) if part)
    said = ". ".join(str(item[key]).rstrip(".") for key in ("message", "hint") if item.get(key))
    said = f"{said}." if said else json.dumps(item)
    return f"{place}: {said}" if place and not said.startswith(place) else said


def _hint(error: FineryError) -> str | None:
    if isinstance(error, AuthenticationError):
        return "check FINERY_API_KEY, and that FINERY_BASE_URL is the server that issued it."
    if isinstance(error, NotFoundError) and error.code == "route_not_found":
        return "FINERY_BASE_URL is the address alone, without /v1; else client and server differ in version."
    if isinstance(error, NotFoundError):
        return "check the id, and that the key belongs to the tenant that owns it."
    if isinstance(error, InternalServerError):
        return "the fault is on the server's side; quote the request id when you report it."
    if isinstance(error, JobFailedError):
        return f"finery jobs events {error.job.id}"
    return None
