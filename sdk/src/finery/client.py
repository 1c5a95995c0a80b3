"""The two clients. The same calls, plain and with `await`."""

from __future__ import annotations

import os
from types import TracebackType
from typing import Self

from finery._config import resolve
from finery._runtime import Runtime
from finery._transport import AsyncHttp, AsyncTransport, SyncHttp, SyncTransport
from finery.resources.admin import Admin, AsyncAdmin
from finery.resources.checkpoints import AsyncCheckpoints, Checkpoints
from finery.resources.environments import AsyncEnvironments, Environments
from finery.resources.files import AsyncFiles, Files
from finery.resources.jobs import AsyncJobs, Jobs
from finery.resources.models import AsyncModels, Models
from finery.resources.usage import AsyncUsage, Usage


class Finery:
    """A connection to a Finery server. Safe to share between threads; close it, or use it in a `with`.

    `api_key` defaults to FINERY_API_KEY, `base_url` to FINERY_BASE_URL, else http://127.0.0.1:8700. `timeout`: seconds
    of silence before a call counts as lost. `max_retries`: tries after the first. `reconnect_timeout`: seconds that an
    event stream outlasts a server that does not answer. `transport`: an httpx transport, to send otherwise.
    """

    def __init__(
        self,
        api_key: str | None = None,
        base_url: str | None = None,
        *,
        timeout: float = 60.0,
        max_retries: int = 2,
        reconnect_timeout: float = 120.0,
        transport: SyncHttp | None = None,
        runtime: Runtime | None = None,
    ) -> None:
        config = resolve(
            api_key,
            base_url,
            environment=os.environ,
            timeout=timeout,
            max_retries=max_retries,
            reconnect_timeout=reconnect_timeout,
            runtime=runtime or Runtime(),
        )
        self.base_url = config.base_url
        self._transport = SyncTransport(config, transport)
        self._transport.client = self
        self.files = Files(self._transport)
        self.models = Models(self._transport)
        self.environments = Environments(self._transport)
        self.jobs = Jobs(self._transport)
        self.checkpoints = Checkpoints(self._transport)
        self.usage = Usage(self._transport)
        self.admin = Admin(self._transport)

    def close(self) -> None:
        self._transport.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    def __repr__(self) -> str:
        return f"Finery(base_url={self.base_url!r})"


class AsyncFinery:
    """`Finery` for asyncio: the same arguments, methods and errors. Close it, or use it in an `async with`."""

    def __init__(
        self,
        api_key: str | None = None,
        base_url: str | None = None,
        *,
        timeout: float = 60.0,
        max_retries: int = 2,
        reconnect_timeout: float = 120.0,
        transport: AsyncHttp | None = None,
        runtime: Runtime | None = None,
    ) -> None:
        config = resolve(
            api_key,
            base_url,
            environment=os.environ,
            timeout=timeout,
            max_retries=max_retries,
            reconnect_timeout=reconnect_timeout,
            runtime=runtime or Runtime(),
        )
        self.base_url = config.base_url
        self._transport = AsyncTransport(config, transport)
        self._transport.client = self
        self.files = AsyncFiles(self._transport)
        self.models = AsyncModels(self._transport)
        self.environments = AsyncEnvironments(self._transport)
        self.jobs = AsyncJobs(self._transport)
        self.checkpoints = AsyncCheckpoints(self._transport)
        self.usage = AsyncUsage(self._transport)
        self.admin = AsyncAdmin(self._transport)

    async def close(self) -> None:
        await self._transport.close()

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        await self.close()

    def __repr__(self) -> str:
        return f"AsyncFinery(base_url={self.base_url!r})"
