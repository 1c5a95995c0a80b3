"""Between characters of a text and its tokens."""

from __future__ import annotations

from typing import Any

import numpy as np
from numpy.typing import NDArray
from tokenizers import Encoding


class Places:
    """Between characters of a text and tokens, without the list of all offsets: it is large, and slow to make."""

    def __init__(self, text: str, encoding: Encoding) -> None:
        self._length = len(text)
        self._encoding = encoding
        self._starts: NDArray[np.int64] | None = None

    def token(self, character: int) -> int:
        """The first token that starts at or behind the character."""
        if character >= self._length:
            return len(self._encoding)
        found = self._encoding.char_to_token(character)
        if found is None:  # a character that the tokenizer dropped
            if self._starts is None:
                self._starts = np.array(self._encoding.offsets, dtype=np.int64).reshape(-1, 2)[:, 0]
            return int(np.searchsorted(self._starts, character))
        while found < len(self._encoding) and self.start(found) < character:
            found += 1
        return int(found)

    def start(self, token: int) -> int:
        return self._of(token)[0]

    def end(self, token: int) -> int:
        return self._of(token)[1]

    def _of(self, token: int) -> tuple[int, int]:
        found: Any = self._encoding.token_to_chars(token)
        return int(found[0]), int(found[1])
