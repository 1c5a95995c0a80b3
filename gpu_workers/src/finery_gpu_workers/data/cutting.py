"""What becomes of samples that are longer than the job's `max_length`, or have nothing to train."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal

import numpy as np

from finery.types.methods import Truncation
from finery_gpu_workers.data.chat import RowError
from finery_gpu_workers.data.tokens import TokenRow

NO_TRAINABLE_TOKENS, TOO_LONG, IDENTICAL = "no_trainable_tokens", "too_long", "identical_answers"

Kind = Literal["row", "pair", "prompt"]


@dataclass(frozen=True)
class Cutter:
    max_length: int
    truncation: Truncation
    begin: int | None = None
    """What the tokenizer puts before every text, if it does. A row that starts with it still does after a cut on the
    left, as it would at generation; so one token fewer of its end is kept."""

    def cut(self, row: TokenRow) -> TokenRow | str:
        """The sample as it is trained, or why it is left out. Raises RowError `row_too_long` where the job wants it.

        The first token that is left is never a target: nothing precedes it.
        """
        length = len(row.tokens)
        kept = row
        if length > self.max_length:
            if self.truncation == "drop":
                return TOO_LONG
            if self.truncation == "error":
                raise _too_long(length, self.max_length)
            kept = _joined(row, *self.keeps(row))
        return kept if kept.trained else NO_TRAINABLE_TOKENS

    def cut_all(self, rows: Sequence[TokenRow], kind: Kind) -> list[TokenRow | str]:
        """All samples of a row, as `cut` does; a prompt is never cut, but left out."""
        if kind == "prompt":
            return [TOO_LONG if len(row.tokens) > self.max_length else row for row in rows]
        if kind == "pair":
            kept = self.cut_pair(rows)
            return [kept] * 2 if isinstance(kept, str) else [*kept]
        return [self.cut(row) for row in rows]

    def keeps_all(self, rows: Sequence[TokenRow], kind: Kind) -> list[tuple[slice, slice]]:
        """The two runs of tokens that are left of each sample, where they are cut."""
        return self.keeps_pair(rows) if kind == "pair" else [self.keeps(row) for row in rows]

    def cut_pair(self, rows: Sequence[TokenRow]) -> list[TokenRow] | str:
        """Both sides of a pair, cut so that their prompts stay the same, or why the pair is left out.

        `right` cuts the end of an answer. `left` cuts as many tokens off the beginning of the prompt as the longer side
        needs, of both, and then off the beginning of an answer that is still too long.
        """
        kept = list(rows)
        longest = max(len(row.tokens) for row in rows)
        if longest > self.max_length:
            if self.truncation == "drop":
                return TOO_LONG
            if self.truncation == "error":
                raise _too_long(longest, self.max_length)
            kept = [_joined(row, *keeps) for row, keeps in zip(rows, self.keeps_pair(rows), strict=True)]
        if not all(row.trained for row in kept):
            return NO_TRAINABLE_TOKENS
        return IDENTICAL if np.array_equal(kept[0].tokens, kept[1].tokens) else kept

    def keeps_pair(self, rows: Sequence[TokenRow]) -> list[tuple[slice, slice]]:
        """The two runs of tokens that are left of each side of a pair that is cut."""
        if self.truncation != "left":
            return [(slice(0, 0), slice(0, self.max_length))] * 2
        head = self._head(rows[0])
        first = head + min(max(len(row.tokens) for row in rows) - self.max_length, rows[0].prompt - head)
        return [
            (slice(0, head), slice(max(first, len(row.tokens) - self.max_length + head), len(row.tokens)))
            for row in rows
        ]

    def _head(self, row: TokenRow) -> int:
        return int(int(row.tokens[0]) == self.begin)

    def keeps(self, row: TokenRow) -> tuple[slice, slice]:
        """The two runs of tokens that are left of a row that is cut."""
        if self.truncation != "left":
            return slice(0, 0), slice(0, self.max_length)
        head = self._head(row)
        return slice(0, head), slice(max(head, len(row.tokens) - self.max_length + head), len(row.tokens))


def _joined(row: TokenRow, head: slice, rest: slice) -> TokenRow:
    mask = np.concatenate([row.mask[head], row.mask[rest]])
    mask[0] = 0
    moved = head.stop - rest.start
    places = tuple((max(a + moved, head.stop), max(b + moved, head.stop)) for a, b in row.reasoning)
    tokens = np.concatenate([row.tokens[head], row.tokens[rest]])
    prompt = min(head.stop + max(0, row.prompt - rest.start), len(tokens)) if row.prompt else 0
    return TokenRow(tokens, mask, places, row.lost_reasoning, prompt=prompt)


def _too_long(length: int, limit: int) -> RowError:
    return RowError(
        "row_too_long",
        f"expected at most {limit} tokens (hyperparameters.max_length), found {length}",
        hint="Raise hyperparameters.max_length, shorten the row, or let hyperparameters.truncation cut or drop it.",
    )
