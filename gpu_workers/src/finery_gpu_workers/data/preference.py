"""Prepared pairs, as they are trained: sample 2n of a set is the chosen side of pair n, sample 2n + 1 the rejected."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from finery_gpu_workers.data.prepared import PreparedSet


@dataclass(frozen=True)
class Pair:
    """The masks are 1 where a token of an answer is a target. They are all ones, but for what stands between the
    assistant turns of an answer of several, and for the first token of an answer whose prompt was cut away whole."""

    prompt: NDArray[np.int32]
    """[P], before both answers; empty where truncation (`left`) has cut it away."""
    chosen: NDArray[np.int32]
    """[C], without the prompt; its last token is a target."""
    rejected: NDArray[np.int32]
    """[R]"""
    chosen_mask: NDArray[np.uint8]
    """[C]"""
    rejected_mask: NDArray[np.uint8]
    """[R]"""


class Pairs:
    """The pairs of a prepared set. Raises ValueError if the set holds none."""

    def __init__(self, samples: PreparedSet) -> None:
        if samples.prompts is None or len(samples) % 2:
            raise ValueError(f"expected a set of pairs, found {len(samples)} samples that are none")
        self._samples = samples
        self.lengths: NDArray[np.int64] = samples.lengths.reshape(-1, 2).sum(axis=1) - samples.prompts[::2]
        """[pairs], tokens of prompt (once), chosen and rejected answer"""
        self.trained: NDArray[np.int64] = samples.trained.reshape(-1, 2).sum(axis=1)
        """[pairs], targets of both answers"""
        self.chosen_trained: NDArray[np.int64] = samples.trained[::2]
        """[pairs], targets of the chosen answer"""

    def __len__(self) -> int:
        return len(self.lengths)

    def pair(self, n: int) -> Pair:
        chosen, rejected = self._samples.row(2 * n), self._samples.row(2 * n + 1)
        start = chosen.prompt
        return Pair(
            prompt=chosen.tokens[:start],
            chosen=chosen.tokens[start:],
            rejected=rejected.tokens[start:],
            chosen_mask=chosen.mask[start:],
            rejected_mask=rejected.mask[start:],
        )
