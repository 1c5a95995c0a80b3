"""From rendered rows to token ids and masks: every row is tokenised once, and positions come from offsets."""

from __future__ import annotations

import hashlib
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np
from numpy.typing import NDArray
from tokenizers import Encoding, Tokenizer

from finery_gpu_workers.data.chat import Rendered, RowError, not_a_prefix


@dataclass(frozen=True)
class TokenRow:
    tokens: NDArray[np.int32]
    """[T]"""
    mask: NDArray[np.uint8]
    """[T], 1 where the token is a target; the first never is: nothing precedes it."""

    @property
    def trained(self) -> int:
        return int(self.mask.sum())

    def cut(self, max_length: int) -> TokenRow:
        """The first `max_length` tokens."""
        return TokenRow(self.tokens[:max_length], self.mask[:max_length])


class RowTokenizer:
    """A model's tokenizer; it adds no token of its own, since templates write them all."""

    def __init__(self, tokenizer: Tokenizer) -> None:
        tokenizer.no_truncation()
        tokenizer.no_padding()
        tokenizer.post_processor = None  # some trim white space off the offsets
        self._tokenizer = tokenizer
        added = tokenizer.get_added_tokens_decoder()
        self._special = np.array(sorted(id_ for id_, token in added.items() if token.special), dtype=np.int64)
        self._prompts: dict[str, list[int]] = {}
        self.end_of_turn: set[int] = set()
        """Ids that have ended a trained turn so far."""

    @classmethod
    def load(cls, folder: Path) -> RowTokenizer:
        return cls(Tokenizer.from_file(str(folder / "tokenizer.json")))

    def rows(self, rendered: Sequence[Rendered]) -> list[TokenRow | RowError]:
        encodings = self._tokenizer.encode_batch([row.text for row in rendered], add_special_tokens=False)
        return [self._row(row, encoding) for row, encoding in zip(rendered, encodings, strict=True)]

    def _row(self, rendered: Rendered, encoding: Encoding) -> TokenRow | RowError:
        ids = np.array(encoding.ids, dtype=np.int64)
        mask = np.full(len(ids), rendered.everything, dtype=np.uint8)
        offsets = np.array(encoding.offsets, dtype=np.int64).reshape(-1, 2)
        special = np.isin(ids, self._special)
        for turn in rendered.turns:
            first, last = np.searchsorted(offsets[:, 0], [turn.start, turn.end])
            if not self._same_prompt(rendered.text, turn.start, ids[:first], offsets[:first], special[:first]):
                return not_a_prefix()
            ends = np.flatnonzero(special[first:last] & (offsets[first:last, 0] >= turn.content_end))
            if len(ends):
                last = first + ends[0] + 1
                self.end_of_turn.add(int(ids[last - 1]))
            mask[first:last] = not rendered.everything
        mask[:1] = 0
        return TokenRow(ids.astype(np.int32), mask)

    def _same_prompt(
        self, text: str, end: int, ids: NDArray[np.int64], offsets: NDArray[np.int64], special: NDArray[np.bool_]
    ) -> bool:
        """Whether the prompt alone has the ids that it has inside the row.

        Special tokens split the text before anything else, so that what follows the last one decides. It is the
        same few characters in almost every row.
        """
        if not len(ids) or offsets[-1, 1] > end:
            return False
        places = np.flatnonzero(special)
        start = int(places[-1]) if len(places) else 0
        tail = text[int(offsets[start, 0]) : end]
        if tail not in self._prompts:
            if len(self._prompts) > 1000:
                self._prompts.clear()
            self._prompts[tail] = self._tokenizer.encode(tail, add_special_tokens=False).ids
        return bool(self._prompts[tail] == ids[start:].tolist())


def tokenizer_sha256(folder: Path) -> str:
    return hashlib.sha256((folder / "tokenizer.json").read_bytes()).hexdigest()
