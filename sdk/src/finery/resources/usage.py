"""Metered usage."""

from __future__ import annotations

import builtins
from collections.abc import Sequence
from datetime import datetime

from finery import _calls
from finery._paging import AsyncPages, Pages
from finery._transport import AsyncTransport, SyncTransport
from finery.types.jobs import Job
from finery.types.usage import GroupBy, UsageRow


class Usage:
    def __init__(self, transport: SyncTransport) -> None:
        self._transport = transport

    def list(
        self,
        *,
        job: Job | str | None = None,
        start: datetime | None = None,
        end: datetime | None = None,
        group_by: Sequence[GroupBy] = ("sku",),
    ) -> builtins.list[UsageRow]:
        """Sums over [start, end), by any of job, sku, day. Times need a zone: a naive one is a `ValueError`."""
        return builtins.list(Pages(self._transport.send, _calls.list_usage(job, start, end, group_by)))


class AsyncUsage:
    def __init__(self, transport: AsyncTransport) -> None:
        self._transport = transport

    async def list(
        self,
        *,
        job: Job | str | None = None,
        start: datetime | None = None,
        end: datetime | None = None,
        group_by: Sequence[GroupBy] = ("sku",),
    ) -> builtins.list[UsageRow]:
        """Sums over [start, end), by any of job, sku, day. Times need a zone: a naive one is a `ValueError`."""
        pages = AsyncPages(self._transport.send, _calls.list_usage(job, start, end, group_by))
        return [row async for row in pages]
