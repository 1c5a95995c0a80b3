"""What every route needs, made once by `create_app` and passed in."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Annotated

from fastapi import Depends, Request
from obstore.store import ObjectStore
from sqlalchemy.ext.asyncio import AsyncEngine

from finery_service.clock import Clock
from finery_service.db.notify import EventFeeds
from finery_service.http.metrics import Metrics
from finery_service.settings import Settings


@dataclass(frozen=True)
class Services:
    settings: Settings
    app_engine: AsyncEngine
    """finery_app: one tenant per transaction, under row-level security."""
    system_engine: AsyncEngine
    """finery_system: operators' requests and the event poller."""
    store: ObjectStore
    clock: Clock
    feeds: EventFeeds
    metrics: Metrics


def services_of(request: Request) -> Services:
    services = request.app.state.services
    assert isinstance(services, Services)
    return services


Here = Annotated[Services, Depends(services_of)]
