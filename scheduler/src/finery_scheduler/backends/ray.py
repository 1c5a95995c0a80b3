"""The pool behind a Ray cluster, seen from the control plane, which itself never loads Ray.

Ray's driver process exits when the head's GCS is lost, so it lives in a supervised child (`ray_driver`). The child
holds no state; whenever it fails to answer it is killed, and the next call starts another.
"""

from __future__ import annotations

import asyncio
import ipaddress
import itertools
import json
import logging
import os
import sys
from contextlib import suppress
from typing import Any

from finery_scheduler.backend import Launch, LaunchError, PoolUnreachableError, WorkerStatus
from finery_scheduler.core.types import Node

log = logging.getLogger("finery_scheduler.ray")

REPLY_BYTES = 64 * 2**20


class RayBackend:
    """All times in seconds. `address` is the GCS as `host:port`; `token` is the cluster's RAY_AUTH_TOKEN."""

    def __init__(
        self,
        address: str,
        token: str,
        namespace: str = "finery",
        python: str = sys.executable,
        *,
        connect_timeout: float = 45.0,
        request_timeout: float = 20.0,
        launch_timeout: float = 120.0,
        grant_timeout: float = 10.0,
        max_backoff: float = 15.0,
    ) -> None:
        self._address = address
        self._token = token
        self._namespace = namespace
        self._python = python
        self._connect_timeout = connect_timeout
        self._request_timeout = request_timeout
        self._launch_timeout = launch_timeout
        self._grant_timeout = grant_timeout
        self._max_backoff = max_backoff
        self._driver: _Driver | None = None
        self._connecting = asyncio.Lock()
        self._failures = 0
        self._not_before = 0.0

    def __repr__(self) -> str:
        return f"RayBackend({self._address!r}, namespace={self._namespace!r})"

    async def start(self) -> None:
        await self._connected()

    async def close(self) -> None:
        if self._driver is not None:
            await self._driver.kill()
            self._driver = None

    async def nodes(self) -> tuple[Node, ...]:
        return tuple(Node(**node) for node in await self._call("nodes", self._request_timeout))

    async def launch(self, launch: Launch) -> None:
        placements = [{"node": p.node, "slots": p.slots} for p in launch.placements]
        await self._call(
            "launch",
            self._launch_timeout,
            attempt=launch.attempt,
            entrypoint=launch.entrypoint,
            environment=launch.environment,
            placements=placements,
            grant_seconds=self._grant_timeout,
        )

    async def workers(self) -> dict[str, WorkerStatus]:
        return dict(await self._call("workers", self._request_timeout))

    async def stop(self, attempt: str) -> None:
        await self._call("stop", 3 * self._request_timeout, attempt=attempt)

    async def _call(self, call: str, seconds: float, **arguments: Any) -> Any:
        driver = await self._connected()
        try:
            reply = await asyncio.wait_for(driver.request(call, arguments), seconds)
        except TimeoutError:
            await driver.kill()
            raise PoolUnreachableError(f"Ray at {self._address} did not answer {call} within {seconds:.0f} s") from None
        self._failures = 0
        if error := reply.get("error"):
            raise (LaunchError if error["kind"] == "launch" else PoolUnreachableError)(error["message"])
        return reply["result"]

    async def _connected(self) -> _Driver:
        """A driver that was alive a moment ago. A dead GCS is noticed here: Ray itself would hang for minutes."""
        async with self._connecting:
            try:
                await self._probe()
            except PoolUnreachableError:
                await self.close()
                raise
            if self._driver is not None and self._driver.alive:
                return self._driver
            now = asyncio.get_running_loop().time()
            if now < self._not_before:
                raise PoolUnreachableError(f"Ray driver for {self._address} failed {self._failures} times; waiting")
            await self.close()
            self._failures += 1
            self._not_before = now + min(self._max_backoff, 0.25 * 2**self._failures) * (self._failures > 1)
            self._driver = await self._spawn()
            return self._driver

    async def _probe(self) -> None:
        host, _, port = self._address.rpartition(":")
        try:
            _, writer = await asyncio.wait_for(asyncio.open_connection(host, int(port)), 2.0)
        except (OSError, TimeoutError) as error:
            raise PoolUnreachableError(f"no Ray head listens on {self._address}") from error
        writer.close()

    async def _spawn(self) -> _Driver:
        process = await asyncio.create_subprocess_exec(
            self._python,
            "-m",
            "finery_scheduler.backends.ray_driver",
            self._address,
            self._namespace,
            stdin=asyncio.subprocess.PIPE,
            stdout=asyncio.subprocess.PIPE,
            env=_environment(self._address, self._token),
            limit=REPLY_BYTES,
        )
        driver = _Driver(process)
        try:
            await asyncio.wait_for(asyncio.shield(driver.ready), self._connect_timeout)
        except BaseException as error:
            await driver.kill()
            if driver.ready.done() and not driver.ready.cancelled():
                driver.ready.exception()  # seen: it says no more than `error` does
            if isinstance(error, TimeoutError):
                late = f"Ray driver could not join {self._address} within {self._connect_timeout:.0f} s"
                raise PoolUnreachableError(late) from None
            raise
        log.info("ray driver %d joined %s", process.pid, self._address)
        return driver


class _Driver:
    """One child process and the requests in flight to it."""

    def __init__(self, process: asyncio.subprocess.Process) -> None:
        self._process = process
        self._ids = itertools.count(1)
        self.ready: asyncio.Future[dict[str, Any]] = asyncio.get_running_loop().create_future()
        self._waiting = {0: self.ready}
        self._reader = asyncio.create_task(self._read())

    @property
    def alive(self) -> bool:
        return self._process.returncode is None and not self._reader.done()

    async def request(self, call: str, arguments: dict[str, Any]) -> dict[str, Any]:
        """The reply. Raises `PoolUnreachableError` if the driver dies first; what it had begun may have happened."""
        if not self.alive:
            raise PoolUnreachableError("the Ray driver died")
        number = next(self._ids)
        reply: asyncio.Future[dict[str, Any]] = asyncio.get_running_loop().create_future()
        self._waiting[number] = reply
        assert self._process.stdin is not None
        try:
            self._process.stdin.write(json.dumps({"id": number, "call": call, "arguments": arguments}).encode() + b"\n")
            await self._process.stdin.drain()
            return await reply
        except ConnectionError:
            raise PoolUnreachableError("the Ray driver died") from None
        finally:
            self._waiting.pop(number, None)

    async def kill(self) -> None:
        """Workers are detached: the driver's death touches none."""
        with suppress(ProcessLookupError):
            self._process.kill()
        await self._process.wait()
        await self._reader

    async def _read(self) -> None:
        assert self._process.stdout is not None
        try:
            while line := await self._process.stdout.readline():
                reply = json.loads(line)
                waiting = self._waiting.get(reply["id"])
                if waiting is not None and not waiting.done():
                    waiting.set_result(reply)
        except Exception:
            # Not one of our replies, or too long for one: nothing after it can be trusted.
            log.exception("the Ray driver %d cannot be understood", self._process.pid)
            with suppress(ProcessLookupError):
                self._process.kill()
        code = await self._process.wait()
        for waiting in self._waiting.values():
            if not waiting.done():
                waiting.set_exception(PoolUnreachableError(f"the Ray driver died (exit status {code})"))


def _environment(address: str, token: str) -> dict[str, str]:
    """What the driver inherits: none of the control plane's own settings and secrets."""
    inherited = {name: value for name, value in os.environ.items() if not name.startswith("FINERY_")}
    environment = {**inherited, "RAY_AUTH_MODE": "token", "RAY_AUTH_TOKEN": token, "RAY_USAGE_STATS_ENABLED": "0"}
    host = address.rpartition(":")[0]
    with suppress(ValueError):
        if ipaddress.ip_address(host).is_loopback:
            environment["RAY_ENABLE_WINDOWS_OR_OSX_CLUSTER"] = "0"  # else Ray rewrites loopback to the outer address
    return environment
