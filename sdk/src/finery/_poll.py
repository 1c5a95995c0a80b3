"""Waiting for what a worker makes on request: looked at again and again, ever less often. Nothing here sends."""

from __future__ import annotations

from finery._config import Config
from finery.errors import EnvironmentRunFailedError, PreviewFailedError, WaitTimeoutError
from finery.types.environments import EnvironmentRun
from finery.types.previews import Preview

_FIRST, _GROWTH, _LONGEST = 0.2, 1.5, 5.0  # seconds


class Poll:
    """`timeout` counts from now, by the monotonic clock."""

    def __init__(self, config: Config, timeout: float) -> None:
        self._now = config.runtime.monotonic
        self._timeout = timeout
        self._deadline = self._now() + timeout
        self._next = _FIRST

    def pause(self, asked: Preview | EnvironmentRun) -> float:
        """Seconds until the next look: 0.2, 0.3, 0.45, … ≤ 5, and never past the deadline."""
        left = self._deadline - self._now()
        if left <= 0:
            raise WaitTimeoutError(
                f"{_name(asked)} was not ready within {self._timeout:g} s: no worker has come to it yet, or it is not "
                "through. It stays asked for; ask again, or pass a longer timeout."
            )
        pause, self._next = min(self._next, left), min(self._next * _GROWTH, _LONGEST)
        return pause


def ready(asked: Preview | EnvironmentRun) -> bool:
    """False while it is pending. Raises `PreviewFailedError`, `EnvironmentRunFailedError`."""
    if asked.status == "failed":
        raise PreviewFailedError(asked) if isinstance(asked, Preview) else EnvironmentRunFailedError(asked)
    return asked.status == "ready"


def _name(asked: Preview | EnvironmentRun) -> str:
    if isinstance(asked, Preview):
        return f"Preview {asked.id} of {asked.file}"
    return f"Run {asked.id} of {asked.environment}"
