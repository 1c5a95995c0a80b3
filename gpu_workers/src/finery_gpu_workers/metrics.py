"""What is measured about a step."""

from __future__ import annotations

import resource
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import asdict, dataclass

import torch


@dataclass
class Clock:
    """How long a step took, and how much of that was inside the learner."""

    started: float = 0.0
    learner: float = 0.0

    def restart(self) -> tuple[float, float]:
        """(step seconds, learner seconds) since the last restart."""
        now = time.monotonic()
        spans = now - self.started, self.learner
        self.started, self.learner = now, 0.0
        return spans

    @contextmanager
    def in_learner(self) -> Iterator[None]:
        start = time.monotonic()
        yield
        self.learner += time.monotonic() - start


@dataclass(frozen=True)
class StepMetrics:
    """Metrics of one step, under the names that customers see."""

    loss: float
    """Mean over the step's trained tokens (SFT) or pairs (DPO)."""
    trained_tokens: int
    """Scored positions with weight > 0."""
    tokens: int
    """All tokens of the step; there is no padding, and a prompt that answers share counts once."""
    learning_rate: float
    grad_norm: float
    """Global L2 norm before clipping."""
    step_seconds: float
    """From the end of the step before, waiting included."""
    learner_seconds: float
    """Inside the learner."""
    memory_bytes: int

    def as_dict(self) -> dict[str, float]:
        rate = self.tokens / self.step_seconds if self.step_seconds > 0 else 0.0
        return {name: float(value) for name, value in asdict(self).items()} | {"tokens_per_second": rate}


def memory_bytes(device: str | torch.device) -> int:
    """Peak memory: the accelerator's, or this process's resident set on a CPU."""
    if torch.device(device).type == "cuda":
        return torch.cuda.max_memory_allocated(device)
    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    # Kilobytes on Linux, bytes on macOS.
    return peak if sys.platform == "darwin" else peak * 1024
