"""Where an answer ends: at an end token, or with the token that completes a stop text."""

from __future__ import annotations

from collections.abc import Callable, Sequence

TextOf = Callable[[Sequence[int]], str]

# Characters at the edges of a window that may be other than in the whole text: parts of a character that began before
# it or goes on behind it, a space that the tokenizer strips from what it takes for the beginning.
_EDGE = 8


class StopTexts:
    """Looks for the texts in one growing answer. A token costs the decoding of a window of bounded text, not of all.

    The window keeps more characters than the longest text has, so that what the next token completes lies in it.
    """

    def __init__(self, texts: Sequence[str], text_of: TextOf) -> None:
        self._texts = texts
        self._text_of = text_of
        self._needed = max(map(len, texts), default=0) + _EDGE
        self._start = 0
        self._shorten_at = 2 * self._needed

    def completed_by(self, tokens: Sequence[int]) -> bool:
        """tokens: the answer so far; it has grown by one token since the last call."""
        if not self._texts:
            return False
        text = self._text_of(tokens[self._start :])
        if any(one in text for one in self._texts):
            return True
        count = len(tokens) - self._start
        if count >= self._shorten_at:
            middle = self._start + count // 2
            if len(self._text_of(tokens[middle:])) >= self._needed:
                self._start = middle
            else:  # many tokens without text
                self._shorten_at = 2 * count
        return False
