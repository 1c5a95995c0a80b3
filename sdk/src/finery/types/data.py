"""What preparation found in the data of a job."""

from __future__ import annotations

from typing import Any

from finery.types.base import Resource


class LengthBin(Resource):
    up_to: int
    """Tokens, inclusive; the lower edge is the bin before. Edges are powers of two; the last holds the longest row."""
    rows: int


class SetReport(Resource):
    """One file: the rows that are trained (or evaluated) on, and what became of the others."""

    format: str
    rows: int
    """Rows that are used: of pairs, pairs. `rows` + `dropped_rows` is what was uploaded; of prompts,
    what belongs to this set."""
    tokens: int
    """The prompt of a pair counts once."""
    trained_tokens: int
    """Tokens with loss in one pass."""
    dropped_rows: int
    dropped: dict[str, int] = {}
    """Dropped rows by reason: `no_trainable_tokens`, `too_long`; of pairs `identical_answers`, where both are the same
    after a cut; of prompts `in_held_out`."""
    dropped_lines: tuple[int, ...] = ()
    """The first 100; a parquet file's rows count from 1 as lines do."""
    truncated_rows: int
    truncated_lines: tuple[int, ...] = ()
    unrolled_rows: int = 0
    """Chat rows that are trained turn by turn, because the model's template strips something (reasoning of earlier
    turns) from a conversation once it goes on. Each counts once in `rows`, its turns add to `tokens`."""
    reasoning_tokens_in_data: int = 0
    """Tokens of reasoning in the turns that are to be trained."""
    reasoning_tokens_trained: int = 0
    longest: int
    """Tokens, before truncation."""
    shortest: int
    lengths: tuple[LengthBin, ...] = ()
    """Histogram of the rows' tokens before truncation, dropped rows included."""
    digest: str
    """sha256 over the prepared shards."""


class Warning(Resource):  # noqa: A001 (the word of the field)
    """Something that is probably not what was meant, but can be trained."""

    code: str
    """As in `reasoning_not_trained`."""
    message: str
    param: str | None = None
    details: list[dict[str, Any]] | None = None


class DataReport(Resource):
    sets: dict[str, SetReport]
    """`train` and, with a validation file or held-out prompts, `validation`."""
    warnings: tuple[Warning, ...] = ()
    template_sha256: str | None = None
    """None when no row needed a template."""
    tokenizer_sha256: str
    vocab_size: int
    """Of the tokenizer, added tokens included."""
