"""Whether to try a call again, and when. Pure."""

from __future__ import annotations

from collections.abc import Callable

from finery.errors import APIError

LONGEST_RETRY_AFTER = 60.0
_NEVER = frozenset({400, 401, 403, 404, 413, 422})


def retryable(error: APIError) -> bool:
    """True if the same call may succeed later: nothing answered, 408, 409 in flight, 429, 5xx."""
    if error.should_retry is False or error.status in _NEVER:
        return False
    if error.should_retry or error.status is None or error.status in (408, 429) or error.status >= 500:
        return True
    return error.status == 409 and error.code == "request_in_progress"


def backoff(attempt: int, random: Callable[[], float], longest: float = 8.0) -> float:
    """Seconds before attempt + 1: 0.5, 1, 2, … ≤ `longest`, each times a random factor in [0.5, 1)."""
    return min(longest, 0.5 * 2.0 ** min(attempt - 1, 10)) * (0.5 + random() / 2)


def retry_delay(error: APIError, attempt: int, *, max_attempts: int, random: Callable[[], float]) -> float | None:
    """Seconds to wait after `attempt` (from 1) failed with `error`; None to give up and raise it."""
    if attempt >= max_attempts or not retryable(error):
        return None
    if error.retry_after is not None:
        return error.retry_after if error.retry_after <= LONGEST_RETRY_AFTER else None
    return backoff(attempt, random)
