"""A run of an environment as text and as HTML: prompts, rewards of answers, how they are distributed.

What prompts, answers and graders say is data: it is shown, never obeyed (`_visible`).
"""

from __future__ import annotations

import json
import math
import unicodedata
from collections import Counter
from collections.abc import Iterator
from html import escape
from typing import TYPE_CHECKING, Any

from finery._visible import BOLD, RED, RESET, document, escaped, lines, one_line, visible

if TYPE_CHECKING:
    from finery.types.environments import EnvironmentRun, GradedAnswer, ShownPrompt

_COLUMNS = ("prompt", "answer", "reward", "parts", "failure")
_LONGEST = 60  # characters of an answer in a terminal
_LONGEST_PROMPT = 200
_LONGEST_HTML = 400
_BINS = 8
_BAR = 30  # characters of the longest bar
_STYLE = """
.finery-run{font:14px/1.5 system-ui,sans-serif;color:#111;background:#fff;padding:8px;max-width:64rem}
.finery-run table{border-collapse:collapse;margin:8px 0;font-size:13px}
.finery-run th,.finery-run td{border:1px solid #ddd;padding:3px 8px;text-align:left;vertical-align:top;
overflow-wrap:anywhere}
.finery-run pre{font:13px/1.5 ui-monospace,monospace;white-space:pre-wrap;overflow-wrap:anywhere;margin:4px 0}
.finery-run .bad{color:#b91c1c}
"""


def text(run: EnvironmentRun, *, color: bool) -> str:
    """Prompts, then a table of the answers, then what went wrong, what was printed, and the distribution."""
    bold, red, reset = (BOLD, RED, RESET) if color else ("", "", "")
    blocks = [f"{bold}{visible(_title(run))}{reset}"]
    if run.error is not None:
        blocks.append(f"{red}{lines(run.error.message)}{reset}")
    if run.prompts:
        blocks.append("\n".join(f"prompt {one.index}: {_shown(one, _LONGEST_PROMPT)}" for one in run.prompts))
    if run.answers:
        head, *rows = _aligned([_COLUMNS, *(_cells(one, _LONGEST) for one in run.answers)])
        blocks.append("\n".join([f"{bold}{head}{reset}", *rows]))
    blocks += [f"{red}{visible(head)}{reset}\n{lines(said)}" for head, said in _remarks(run)]
    return "\n\n".join([*blocks, *_distribution(run)])


def fragment(run: EnvironmentRun) -> str:
    """HTML for a notebook; it carries its style and nothing that runs."""
    parts = [f'<div class="finery-run"><style>{_STYLE}</style><div>{escaped(_title(run))}</div>']
    if run.error is not None:
        parts.append(f'<p class="bad">{escaped(run.error.message)}</p>')
    prompts = ((one.index, escaped(_shown(one, _LONGEST_HTML))) for one in run.prompts)
    parts += [f'<pre dir="ltr">prompt {index}: {shown}</pre>' for index, shown in prompts]
    if run.answers:
        heads = "".join(f"<th>{name}</th>" for name in _COLUMNS)
        rows = ("".join(f"<td>{escaped(cell)}</td>" for cell in _cells(a, _LONGEST_HTML)) for a in run.answers)
        parts.append(f"<table><tr>{heads}</tr>{''.join(f'<tr>{row}</tr>' for row in rows)}</table>")
    for head, said in _remarks(run):
        parts.append(f'<div class="bad">{escaped(head)}</div><pre dir="ltr">{escape(lines(said))}</pre>')
    parts += [f'<pre dir="ltr">{block}</pre>' for block in _distribution(run)]  # nothing but our words and numbers
    return "".join([*parts, "</div>"])


def page(run: EnvironmentRun) -> str:
    """The fragment as a document of its own."""
    return document(_title(run), fragment(run))


def _title(run: EnvironmentRun) -> str:
    of = "" if run.prompt_count is None else f" of {run.prompt_count:,} prompts"
    state = "" if run.status == "ready" else f" ({run.status})"
    return f"{run.environment}{of}: {_count(len(run.answers), 'answer')}{state}"


def _shown(prompt: ShownPrompt, longest: int) -> str:
    """What is asked last, and what graders see next to it."""
    words = prompt.text if prompt.text is not None else _content(prompt.messages[-1]) if prompt.messages else ""
    fields = {name: value for name, value in prompt.item.items() if name not in ("messages", "prompt")}
    item = f"  item {one_line(json.dumps(fields, ensure_ascii=False), longest)}" if fields else ""
    return f"{one_line(words, longest)}{item}"


def _content(message: dict[str, Any]) -> str:
    content = message.get("content")
    return content if isinstance(content, str) else json.dumps(content, ensure_ascii=False)


def _cells(answer: GradedAnswer, longest: int) -> tuple[str, ...]:
    parts = "  ".join(f"{one_line(name, 64)} {_number(value)}" for name, value in answer.parts.items())
    failure = "" if answer.failure is None else one_line(answer.failure.code, 64)
    return str(answer.prompt), one_line(answer.output_text, longest), _number(answer.reward), parts, failure


def _remarks(run: EnvironmentRun) -> Iterator[tuple[str, str]]:
    """Why an answer has no reward, each reason once, and what graders printed."""
    reasons: dict[tuple[str, str], list[int]] = {}
    for number, answer in enumerate(run.answers, start=1):
        if answer.failure is not None:
            grader = f" by {answer.failure.grader}" if answer.failure.grader else ""
            reasons.setdefault((f"{answer.failure.code}{grader}", answer.failure.message), []).append(number)
    for (what, message), numbers in reasons.items():
        yield f"no reward for {_answers(numbers)}: {what}", message
    for number, answer in enumerate(run.answers, start=1):
        if answer.printed:
            yield f"printed for answer {number}", answer.printed


def _distribution(run: EnvironmentRun) -> list[str]:
    """Mean, extremes, and a bar for each value, or for each of eight ranges where there are more."""
    rewards = [answer.reward for answer in run.answers if answer.reward is not None]
    if not run.answers:
        return []
    lost = len(run.answers) - len(rewards)
    said = f"{_count(len(rewards), 'reward')}, {lost} without one" if lost else _count(len(rewards), "reward")
    if not rewards:
        return [said]
    low, high = min(rewards), max(rewards)
    mean = math.fsum(reward / len(rewards) for reward in rewards)  # a sum of the largest floats is none
    bars = bins(rewards, low, high)
    most, width = max(count for _, count in bars), max(len(name) for name, _ in bars)
    lines = (f"  {name:>{width}}  {count:>5}  {'█' * math.ceil(count * _BAR / most)}".rstrip() for name, count in bars)
    head = f"{said}: mean {_number(mean)}, lowest {_number(low)}, highest {_number(high)}"
    return ["\n".join([head, *lines])]


def bins(rewards: list[float], low: float, high: float) -> list[tuple[str, int]]:
    """Each value, or each of eight equal ranges from `low` to `high`, and how many rewards it has."""
    counts = Counter(rewards)
    if len(counts) <= _BINS:
        return [(_number(value), count) for value, count in sorted(counts.items())]
    width = high / _BINS - low / _BINS
    places = Counter(min(int(value / width - low / width), _BINS - 1) for value in rewards)
    return [(f"{_number(low + n * width)} to {_number(low + (n + 1) * width)}", places[n]) for n in range(_BINS)]


def _answers(numbers: list[int]) -> str:
    shown = ", ".join(map(str, numbers[:10])) + (" …" if len(numbers) > 10 else "")
    return f"answer {shown}" if len(numbers) == 1 else f"answers {shown}"


def _count(count: int, noun: str) -> str:
    return f"{count} {noun}" if count == 1 else f"{count} {noun}s"


def _number(value: float | None) -> str:
    return "–" if value is None else f"{value:.4g}"


def _aligned(rows: list[tuple[str, ...]]) -> list[str]:
    widths = [max(map(_width, column)) for column in zip(*rows, strict=True)]
    return [
        "  ".join(cell + " " * (width - _width(cell)) for cell, width in zip(row, widths, strict=True)).rstrip()
        for row in rows
    ]


def _width(words: str) -> int:
    """Columns of a terminal: East Asian characters take two, combining ones none (Unicode Annex 11)."""
    return sum(2 if unicodedata.east_asian_width(c) in "WF" else not unicodedata.combining(c) for c in words)
