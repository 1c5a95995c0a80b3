"""Waiting for a preview: asked for again and again, ever less often. It neither sends nor sleeps."""

from __future__ import annotations

from finery._config import Config
from finery.errors import PreviewFailedError, WaitTimeoutError
from finery.types.previews import Preview

_FIRST, _GROWTH, _LONGEST = 0.2, 1.5, 5.0  # seconds


class Poll:
    """`timeout` counts from now, by the monotonic clock."""

    def __init__(self, config: Config, timeout: float) -> None:
        self._now = config.runtime.monotonic
        self._timeout = timeout
        self._deadline = self._now() + timeout
        self._next = _FIRST

    def pause(self, preview: Preview) -> float:
        """Seconds until the next look: 0.2, 0.3, 0.45, … ≤ 5, and never past the deadline."""
        left = self._deadline - self._now()
        if left <= 0:
            raise WaitTimeoutError(
                f"Preview {preview.id} of {preview.file} was not ready within {self._timeout:g} s: no worker has come "
                "to it yet. It stays asked for; ask again, or pass a longer timeout."
            )
        pause, self._next = min(self._next, left), min(self._next * _GROWTH, _LONGEST)
        return pause


def ready(preview: Preview) -> bool:
    """False while it is pending. Raises `PreviewFailedError`."""
    if preview.status == "failed":
        raise PreviewFailedError(preview)
    return preview.status == "ready"
