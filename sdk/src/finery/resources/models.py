"""Base models in the catalogue."""

from __future__ import annotations

from typing import Any

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

    def create(self, **fields: Any) -> Model:
        """Add a base model (operators); the fields are those of `finery.types.models.ModelCreate`."""
        return self._transport.send(_calls.create_model(fields, self._transport.config.runtime.new_key()))


class AsyncModels:
    def __init__(self, transport: AsyncTransport) -> None:
        self._transport = transport

    def list(self, *, limit: int | None = None) -> AsyncPages[Model]:
        return AsyncPages(self._transport.send, _calls.list_models(limit))

    async def retrieve(self, model: Model | str) -> Model:
        """By id or by name."""
        return await self._transport.send(_calls.retrieve_model(model))

    async def create(self, **fields: Any) -> Model:
        """Add a base model (operators); the fields are those of `finery.types.models.ModelCreate`."""
        return await self._transport.send(_calls.create_model(fields, self._transport.config.runtime.new_key()))
