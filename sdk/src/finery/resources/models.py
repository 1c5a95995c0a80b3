"""Base models in the catalogue."""

from __future__ import annotations

from finery import _calls
from finery._paging import AsyncPages, Pages
from finery._transport import AsyncTransport, SyncTransport
from finery.types.models import Model


class Models:
    def __init__(self, transport: SyncTransport) -> None:
        self._transport = transport

    def list(self, *, limit: int | None = None) -> Pages[Model]:
        return Pages(self._transport.send, _calls.list_models(limit))

    def retrieve(self, model: Model | str) -> Model:
        """By id or by name."""
        return self._transport.send(_calls.retrieve_model(model))


class AsyncModels:
    def __init__(self, transport: AsyncTransport) -> None:
        self._transport = transport

    def list(self, *, limit: int | None = None) -> AsyncPages[Model]:
        return AsyncPages(self._transport.send, _calls.list_models(limit))

    async def retrieve(self, model: Model | str) -> Model:
        """By id or by name."""
        return await self._transport.send(_calls.retrieve_model(model))
