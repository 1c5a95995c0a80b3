"""The texts of an uploaded row, as the customer wrote them."""

from __future__ import annotations

import json
from collections.abc import Iterator
from typing import Any

from finery.data.rows import ChatRow, CompletionRow, PreferenceRow, PromptRow, Row, TextRow


def as_json(value: Any) -> str:
    """As templates write it; nothing where it is nested so deep that none could."""
    try:
        return json.dumps(value, ensure_ascii=False)
    except RecursionError:
        return ""


def texts_of(row: Row) -> Iterator[str]:
    """All of which a tokenizer will read; none of a row of token ids, nor of one that has parts."""
    if isinstance(row, ChatRow):
        for message in row.messages:
            yield message["content"]
            if len(message) > 2:
                yield message.get("reasoning_content", "")
                yield as_json(message.get("tool_calls", ""))
        if row.tools:
            yield as_json(row.tools)
    elif isinstance(row, CompletionRow):
        yield from (row.prompt, row.completion)
    elif isinstance(row, TextRow):
        yield row.text


def _parts(row: Row) -> tuple[Row, ...]:
    """Both sides of a pair; the prompt as a row of its own."""
    if isinstance(row, PreferenceRow):
        return row.chosen, row.rejected
    if isinstance(row, PromptRow):
        return (ChatRow(row.messages, row.tools) if row.text is None else TextRow(row.text),)
    return (row,)


def special_in(row: Row, names: set[str], begin: str, end: str) -> set[str]:
    """Those of the special tokens `names` that a text of the row holds.

    Not counted: `begin` at the start and `end` at the end of a row that no template writes, where they belong.
    """
    found: set[str] = set()
    for part in _parts(row):
        texts = list(texts_of(part))
        if texts and not isinstance(part, ChatRow):
            texts[0] = texts[0].removeprefix(begin)
            texts[-1] = texts[-1].removesuffix(end)
        found |= {name for name in names if any(name in text for text in texts)}
    return found
