"""What one reconciler works with."""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from datetime import timedelta

from sqlalchemy.ext.asyncio import AsyncEngine
from sqlmodel.ext.asyncio.session import AsyncSession

from finery_scheduler.backend import Backend
from finery_service.clock import Clock, system_clock
from finery_service.db.engine import transaction
from finery_service.jobs.states import Policy
from finery_service.reconcile import lease
from finery_service.reconcile.lease import Leadership, StaleLeaderError
from finery_service.reconcile.snapshot import Pool, observe
from finery_service.settings import Settings

_SLOW_POOL = 5.0
_FIRST_WAIT, _LONGEST_WAIT = 0.5, 30.0


@dataclass
class Patience:
    """Back-off of work that fails for one attempt, in memory: the obligation itself is in the database."""

    monotonic: Callable[[], float] = time.monotonic
    _failures: dict[str, tuple[int, float]] = field(default_factory=dict)

    def ready(self, key: str) -> bool:
        return self._failures.get(key, (0, 0.0))[1] <= self.monotonic()

    def failed(self, key: str) -> None:
        count = self._failures.get(key, (0, 0.0))[0]
        self._failures[key] = (count + 1, self.monotonic() + min(_FIRST_WAIT * 2**count, _LONGEST_WAIT))

    def succeeded(self, key: str) -> None:
        self._failures.pop(key, None)


@dataclass
class Context:
    engine: AsyncEngine
    """As finery_system."""
    backend: Backend
    settings: Settings
    clock: Clock = system_clock
    leadership: Leadership | None = None
    patience: Patience = field(default_factory=Patience)
    observing: asyncio.Task[Pool] | None = None
    under_way: dict[tuple[str, str], asyncio.Task[str | None]] = field(default_factory=dict)
    """Launches and stops by (kind, attempt) that took more than a moment."""
    at_once: dict[str, asyncio.Semaphore] = field(default_factory=dict)
    turns: dict[str, int] = field(default_factory=dict)
    """By tenant: when a preview or run of it got its last place, counted from 1."""

    @property
    def policy(self) -> Policy:
        return Policy(grace=timedelta(seconds=self.settings.grace_seconds))

    async def pool(self) -> Pool:
        """The pool as it answers. One that is slow counts as unreachable and is waited for in the background: the
        database's side of the work (leases, cancellations) goes on meanwhile."""
        if self.observing is None:
            self.observing = asyncio.create_task(observe(self.backend))
        await asyncio.wait([self.observing], timeout=_SLOW_POOL)
        if not self.observing.done():
            return Pool(False)
        observed, self.observing = self.observing.result(), None
        return observed

    @asynccontextmanager
    async def apply(self) -> AsyncIterator[AsyncSession]:
        """A transaction that commits only under our leadership; raises `StaleLeaderError` otherwise."""
        if self.leadership is None:
            raise StaleLeaderError("not the leader")
        async with transaction(self.engine) as session:
            await lease.guard(session, self.leadership)
            yield session
