"""Whether rows of one set are in another one too, or came before in their own."""

from __future__ import annotations

import hashlib
from array import array
from collections.abc import Sequence

import numpy as np
from numpy.typing import NDArray

from finery_gpu_workers.data.tokens import TokenRow

_OVERLAP = frozenset({"validation_overlap"})


class Overlap:
    """Feed the rows of the first file, `close`, then ask with those of the second. Holds 8 bytes a row."""

    def __init__(self) -> None:
        self._seen = array("Q")
        self._sorted: NDArray[np.uint64] | None = None

    def codes(self, samples: Sequence[TokenRow]) -> frozenset[str]:
        """Of a warning about the row, before it is cut, if there is one. Rows of the same ids are the same."""
        number = _number(samples)
        if self._sorted is None:
            self._seen.append(number)
            return frozenset()
        place = int(np.searchsorted(self._sorted, np.uint64(number)))
        return _OVERLAP if place < len(self._sorted) and int(self._sorted[place]) == number else frozenset()

    def close(self) -> None:
        """The first file is through."""
        if self._sorted is None:
            self._sorted = np.sort(np.frombuffer(self._seen, dtype=np.uint64))


class Repeats:
    """Rows that came before. Holds 16 bytes a row."""

    def __init__(self) -> None:
        self._seen, self._lines = array("Q"), array("q")

    def add(self, samples: Sequence[TokenRow], line: int) -> None:
        self._seen.append(_number(samples))
        self._lines.append(line)

    def lines(self) -> list[int]:
        """Those of all rows but the first of their kind, in order."""
        numbers = np.frombuffer(self._seen, dtype=np.uint64)
        order = np.argsort(numbers, kind="stable")
        again = order[1:][numbers[order[1:]] == numbers[order[:-1]]]
        return [self._lines[n] for n in np.sort(again).tolist()]


def _number(samples: Sequence[TokenRow]) -> int:
    digest = hashlib.blake2b(digest_size=8)
    for sample in samples:
        digest.update(sample.tokens.tobytes())
    return int.from_bytes(digest.digest(), "little")
