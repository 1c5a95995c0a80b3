"""Early stopping on a validation loss, or a reward with its sign turned.

Pure, so that a resumed run stops where an uninterrupted one would.
"""

from __future__ import annotations

from dataclasses import dataclass

from finery.types.methods import Optimization


@dataclass(frozen=True)
class Patience:
    """What the evaluations so far say. The one before the first step is the first best."""

    best: float | None = None
    """The lowest validation loss that counted as better."""
    worse: int = 0
    """Evaluations since."""

    def after(self, loss: float, min_delta: float) -> Patience:
        """One more evaluation: better when more than `min_delta` nats below the best, which NaN never is."""
        if loss < (float("inf") if self.best is None else self.best - min_delta):
            return Patience(best=loss)
        return Patience(self.best, self.worse + 1)

    def is_over(self, hyper: Optimization) -> bool:
        return hyper.early_stopping_patience is not None and self.worse >= hyper.early_stopping_patience
