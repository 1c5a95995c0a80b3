"""What is not deterministic, in one place, so that it can be passed in."""

from __future__ import annotations

import asyncio
import random
import time
import uuid
from collections.abc import Awaitable, Callable
from dataclasses import dataclass


def _new_key() -> str:
    return str(uuid.uuid4())


@dataclass(frozen=True)
class Runtime:
    """Clock, sleep and chance. Seconds everywhere."""

    sleep: Callable[[float], None] = time.sleep
    sleep_async: Callable[[float], Awaitable[None]] = asyncio.sleep
    random: Callable[[], float] = random.random
    """Uniform in [0, 1)."""
    monotonic: Callable[[], float] = time.monotonic
    new_key: Callable[[], str] = _new_key
    """A fresh idempotency key."""
