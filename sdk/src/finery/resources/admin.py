"""What operators do: tenants and their keys. (Base models: `client.models.create`.)"""

from __future__ import annotations

from typing import Any

from finery import _calls
from finery._paging import AsyncPages, Pages
from finery._transport import AsyncTransport, SyncTransport
from finery.types.tenants import Key, Tenant


class Admin:
    def __init__(self, transport: SyncTransport) -> None:
        self.tenants = Tenants(transport)
        self.keys = Keys(transport)


class Tenants:
    def __init__(self, transport: SyncTransport) -> None:
        self._transport = transport

    def create(self, *, name: str) -> Tenant:
        return self._transport.send(_calls.create_tenant({"name": name}, self._transport.config.runtime.new_key()))

    def list(self, *, limit: int | None = None) -> Pages[Tenant]:
        return Pages(self._transport.send, _calls.list_tenants(limit))


class Keys:
    def __init__(self, transport: SyncTransport) -> None:
        self._transport = transport

    def create(self, tenant: Tenant | str, **fields: Any) -> Key:
        """A new key (`name`, `project`). Its `secret` is in this answer and nowhere else."""
        return self._transport.send(_calls.create_key(tenant, fields, self._transport.config.runtime.new_key()))

    def list(self, tenant: Tenant | str, *, limit: int | None = None) -> Pages[Key]:
        return Pages(self._transport.send, _calls.list_keys(tenant, limit))

    def revoke(self, tenant: Tenant | str, key: Key | str) -> Key:
        return self._transport.send(_calls.revoke_key(tenant, key))


class AsyncAdmin:
    def __init__(self, transport: AsyncTransport) -> None:
        self.tenants = AsyncTenants(transport)
        self.keys = AsyncKeys(transport)


class AsyncTenants:
    def __init__(self, transport: AsyncTransport) -> None:
        self._transport = transport

    async def create(self, *, name: str) -> Tenant:
        key = self._transport.config.runtime.new_key()
        return await self._transport.send(_calls.create_tenant({"name": name}, key))

    def list(self, *, limit: int | None = None) -> AsyncPages[Tenant]:
        return AsyncPages(self._transport.send, _calls.list_tenants(limit))


class AsyncKeys:
    def __init__(self, transport: AsyncTransport) -> None:
        self._transport = transport

    async def create(self, tenant: Tenant | str, **fields: Any) -> Key:
        """A new key (`name`, `project`). Its `secret` is in this answer and nowhere else."""
        return await self._transport.send(_calls.create_key(tenant, fields, self._transport.config.runtime.new_key()))

    def list(self, tenant: Tenant | str, *, limit: int | None = None) -> AsyncPages[Key]:
        return AsyncPages(self._transport.send, _calls.list_keys(tenant, limit))

    async def revoke(self, tenant: Tenant | str, key: Key | str) -> Key:
        return await self._transport.send(_calls.revoke_key(tenant, key))
