"""A preview as text for a terminal and as HTML. What a row holds is data: it never reaches the screen as commands.

Trained tokens are marked: in a terminal by a green background, in plain text by ⟦…⟧, in HTML by <mark>. Line ends show
as ⏎.
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from html import escape
from itertools import groupby
from typing import TYPE_CHECKING

from finery._visible import BOLD, DIM, RED, RESET, document, escaped, visible

if TYPE_CHECKING:
    from finery.types.previews import Preview, PreviewRow, PreviewToken

_TRAINED, _SPECIAL = "\x1b[30;42m", "\x1b[35m"
_SPECIAL_TOKEN = re.compile(r"<[^<>\s]+>|\[[A-Z]+\]")
_NO_ROWS = "The file has no row at this place; ask for an earlier first_line."
_STYLE = """
.finery-preview{font:14px/1.5 system-ui,sans-serif;color:#111;background:#fff;padding:8px;max-width:64rem}
.finery-preview h4{font-size:14px;margin:14px 0 4px}
.finery-preview pre{font:13px/1.55 ui-monospace,monospace;white-space:pre-wrap;overflow-wrap:anywhere;margin:0;
padding:8px 10px;border:1px solid #ddd;border-radius:6px;background:#fafafa;color:#111}
.finery-preview mark{background:#bbf7d0;color:#052e16}
.finery-preview i{font-style:normal;color:#7e22ce}
.finery-preview .bad{color:#b91c1c}
"""


def text(preview: Preview, *, color: bool) -> str:
    """Every row with its counts, and what is wrong with it."""
    bold, red, dim, reset = (BOLD, RED, DIM, RESET) if color else ("", "", "", "")
    mark = f"{_TRAINED}trained{RESET}" if color else "⟦trained⟧"
    legend = "" if _are_prompts(preview) else f"  {dim}marked:{reset} {mark}"
    blocks = [f"{bold}{visible(_title(preview))}{reset}{legend}"]
    if preview.status == "failed" and preview.error is not None:
        blocks.append(f"{red}{visible(preview.error.message)}{reset}")
    blocks += [f"{red}warning:{reset} {visible(warning.message)}" for warning in preview.warnings]
    if preview.status == "ready" and not preview.rows:
        blocks.append(_NO_ROWS)
    for heading, row in _headed(preview):
        lines = [f"{bold}{heading}{reset}"]
        lines += [f"{red}{visible(fault)}{reset}" for fault in _faults(row)]
        if row.tokens:
            lines.append((_coloured(row) if color else _bracketed(row)).rstrip("\n"))
        blocks.append("\n".join(lines))
    return "\n\n".join(blocks)


def fragment(preview: Preview) -> str:
    """HTML for a notebook; it carries its style and nothing that runs."""
    legend = "" if _are_prompts(preview) else " · marked: <mark>trained</mark>"
    parts = [f'<div class="finery-preview"><style>{_STYLE}</style><div>{escaped(_title(preview))}{legend}</div>']
    if preview.status == "failed" and preview.error is not None:
        parts.append(f'<p class="bad">{escaped(preview.error.message)}</p>')
    parts += [f'<p class="bad">warning: {escaped(warning.message)}</p>' for warning in preview.warnings]
    if preview.status == "ready" and not preview.rows:
        parts.append(f"<p>{_NO_ROWS}</p>")
    for heading, row in _headed(preview):
        parts.append(f"<h4>{escaped(heading)}</h4>")
        parts += [f'<div class="bad">{escaped(fault)}</div>' for fault in _faults(row)]
        if row.tokens:
            parts.append(f'<pre dir="ltr">{"".join(map(_html_token, row.tokens))}</pre>')
    return "".join([*parts, "</div>"])


def page(preview: Preview) -> str:
    """The fragment as a document of its own, which forbids scripts and loads on top."""
    return document(_title(preview), fragment(preview))


def _title(preview: Preview) -> str:
    state = "" if preview.status == "ready" else f" ({preview.status})"
    seen = "is asked" if _are_prompts(preview) else "is trained on it"
    return f"{preview.file} as {preview.model} {seen}{state}"


def _are_prompts(preview: Preview) -> bool:
    """Of prompts nothing is trained; other rows without a trained token are dropped."""
    return bool(preview.rows) and not any(row.trained_tokens or row.dropped or row.problem for row in preview.rows)


def _headed(preview: Preview) -> Iterator[tuple[str, PreviewRow]]:
    """Rows under headings such as `line 3: 25 tokens, 3 trained`; a row of several parts says which one it is."""
    for line, same in groupby(preview.rows, key=lambda row: row.line):
        rows = list(same)
        for number, row in enumerate(rows, start=1):
            part = f", part {number} of {len(rows)}" if len(rows) > 1 else ""
            part = f", {visible(row.answer)}" if row.answer else part
            cut = ", truncated" if row.truncated else ""
            trained = "" if _are_prompts(preview) else f", {row.trained_tokens} trained"
            yield f"line {line}{part}: {len(row.tokens)} tokens{trained}{cut}", row


def _faults(row: PreviewRow) -> list[str]:
    found = [f"left out of training: {row.dropped}"] if row.dropped else []
    if row.problem is not None:
        said = " ".join(f"{part.rstrip('.')}." for part in (row.problem.message, row.problem.hint) if part)
        found.append(f"a job would refuse this row: {f'{row.problem.path}: ' if row.problem.path else ''}{said}")
    return found


def _bracketed(row: PreviewRow) -> str:
    parts = []
    for trained, run in groupby(row.tokens, key=lambda token: token.trained):
        shown = visible("".join(token.text for token in run))
        # A mark never spans a line end: each line is right by itself.
        parts.append(_per_line(shown, "⟦", "⟧") if trained else shown)
    return "".join(parts)


def _coloured(row: PreviewRow) -> str:
    parts = []
    for token in row.tokens:
        shown = visible(token.text)
        style = _TRAINED if token.trained else _SPECIAL if _special(token) else ""
        parts.append(_per_line(shown, style, RESET) if style else shown)
    return "".join(parts).replace(f"{RESET}{_TRAINED}", "")


def _per_line(shown: str, before: str, after: str) -> str:
    return "\n".join(f"{before}{line}{after}" if line else "" for line in shown.split("\n"))


def _html_token(token: PreviewToken) -> str:
    shown = escape(visible(token.text))
    if not shown:
        return ""
    tag = "mark" if token.trained else "i" if _special(token) else "span"
    return f'<{tag} title="{token.id}">{shown}</{tag}>'


def _special(token: PreviewToken) -> bool:
    return _SPECIAL_TOKEN.fullmatch(token.text) is not None
