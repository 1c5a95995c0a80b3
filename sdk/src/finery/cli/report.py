"""A job for people: its state, what preparation found in its data, and what it warns of."""

from __future__ import annotations

import json
from collections.abc import Sequence

from finery._visible import one_line
from finery.cli.output import err, number, out, print_facts, print_json, print_table, safe
from finery.types.data import DataReport, SetReport
from finery.types.data import Warning as DataWarning
from finery.types.jobs import TERMINAL, Job
from finery.types.rollouts import Rollout

_LINES = 10  # line numbers that are shown
_BAR = 30  # characters of the longest bar


def print_job(job: Job, as_json: bool) -> None:
    if as_json:
        print_json(job)
        return
    state = f"{job.state!s}" + (f", place {job.position} in the queue" if job.position else "")
    wanted = {"cancel": "cancelled", "pause": "paused"}.get(str(job.intent))
    if wanted and job.state not in TERMINAL and job.state != wanted:
        state += f", to be {wanted}"
    print_facts(
        (
            ("id", job.id),
            ("name", job.name),
            ("method", job.method),
            ("model", job.model),
            ("from", job.from_checkpoint),
            ("environment", job.environment_id or (job.environment or {}).get("type")),
            ("state", state),
            ("why", job.error.message if job.error else job.message),
            ("step", steps(job)),
            ("best", job.best_checkpoint),
            ("usage", job.usage),
            ("cost", job.cost),
            ("created", job.created_at),
            ("started", job.started_at),
            ("finished", job.finished_at),
        )
    )
    if job.data is not None:
        for name, found in job.data.sets.items():
            out.print()
            _print_set(name, found)
        print_warnings(job.data)


def steps(job: Job) -> str:
    total = job.progress.total_steps
    return f"{job.progress.step}/{total if total is not None else '?'}"


def print_rollouts(rollouts: Sequence[Rollout]) -> None:
    """A line for each answer."""
    columns = ("step", "prompt", "sample", "reward", "tokens", "end", "asked", "answer")
    print_table(columns, map(_rollout, rollouts))


def _rollout(one: Rollout) -> tuple[object, ...]:
    last = one.messages[-1].get("content") if one.messages else one.prompt_text
    asked = last if isinstance(last, str) else json.dumps(last, ensure_ascii=False)
    reward = None if one.reward is None else number(one.reward)
    reward = reward if one.failure is None else f"no reward: {one_line(one.failure.code, 20)}"
    length = len(one.tokens)
    return one.step, one.prompt, one.sample, reward, length, one.finish, one_line(asked, 40), one_line(one.text, 80)


def print_warnings(data: DataReport) -> None:
    for warning in data.warnings:
        print_warning(warning)


def print_warning(warning: DataWarning) -> None:
    where = f" ({warning.param})" if warning.param and not warning.message.startswith(warning.param) else ""
    err.print(f"[bold yellow]Warning:[/bold yellow] {safe(warning.message + where)}", highlight=False)
    for detail in (warning.details or [])[:_LINES]:
        err.print(f"  {safe('  '.join(f'{name} {_some(value)}' for name, value in detail.items()))}", highlight=False)


def _some(value: object) -> object:
    """A list of line numbers cut short."""
    if not isinstance(value, (list, tuple)) or len(value) <= _LINES:
        return value
    return f"{', '.join(map(str, value[:_LINES]))} and {len(value) - _LINES} more"


def _print_set(name: str, found: SetReport) -> None:
    """Counts, what was dropped and truncated and where, and how long the rows are."""
    reasons = [f"{count} {reason.replace('_', ' ')}" for reason, count in found.dropped.items()]
    dropped = ", ".join(reasons) or str(found.dropped_rows)
    noun = {"preference": "pairs", "prompts": "prompts"}.get(found.format, "rows")
    trained = f", {_percent(found.trained_tokens, found.tokens)} trained in one pass" if noun != "prompts" else ""
    print_facts(
        (
            (f"{name} data", f"{found.format}, {_of(found.rows, found.rows + found.dropped_rows, noun)} used"),
            ("tokens", f"{found.tokens:,}{trained}"),
            (
                "dropped",
                _places(dropped, found.dropped_rows, found.dropped_lines),
            ),
            ("truncated", _places(str(found.truncated_rows), found.truncated_rows, found.truncated_lines)),
            ("turn by turn", f"{found.unrolled_rows} rows" if found.unrolled_rows else None),
            ("reasoning", _reasoning(found)),
            ("lengths", f"{found.shortest:,} to {found.longest:,} tokens"),
        )
    )
    most = max((one.rows for one in found.lengths), default=0)
    for one in found.lengths:
        bar = "█" * max(1, round(one.rows * _BAR / most)) if one.rows else ""
        out.print(f"  ≤ {one.up_to:>7,}  {one.rows:>9,}  [cyan]{bar}[/cyan]", highlight=False)


def _of(part: int, whole: int, noun: str) -> str:
    return f"{part:,} {noun}" if part == whole else f"{part:,} of {whole:,} {noun}"


def _percent(part: int, whole: int) -> str:
    return f"{part:,} ({part / whole:.1%})" if whole else f"{part:,}"


def _places(said: str, count: int, lines: Sequence[int]) -> str | None:
    """`2 no trainable tokens: lines 4, 9`; None if there are none."""
    if not count:
        return None
    shown = ", ".join(map(str, lines[:_LINES]))
    more = f" and {count - _LINES} more" if count > _LINES else ""
    return f"{said}: {'line' if count == 1 else 'lines'} {shown}{more}" if shown else said


def _reasoning(found: SetReport) -> str | None:
    if not found.reasoning_tokens_in_data:
        return None
    return f"{found.reasoning_tokens_trained:,} of {found.reasoning_tokens_in_data:,} tokens trained"
