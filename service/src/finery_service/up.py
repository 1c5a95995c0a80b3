"""`finery-service up`: the whole system on one machine, as the real processes that production runs.

    postgres ─► migrate (to its end) ─► api, rpc ─► reconcile ─► ready
    ray ────────────────────────────────────────────┘

It alone owns the embedded PostgreSQL and the local Ray. A child that dies is started again; all die with us, so a
kill -9 leaves nothing that blocks the next start. `state.json` tells tools the pids, ports and URLs.
"""

from __future__ import annotations

import asyncio
import contextlib
import os
import signal
import sys
import time
from collections.abc import Awaitable, Callable
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import psycopg

from finery_service import operator_client, ray_head
from finery_service.db import embedded
from finery_service.home import Home, HomeError, is_free, write_private
from finery_service.supervisor import Child, Keeper, SupervisorError, run_to_end, until

_PORTS = ("postgres", "ray", "ray_client", "rpc", "api")
_STOP_ORDER = ("api", "rpc", "reconcile", "ray", "postgres")
_NOT_FOR_ALL = (
    "FINERY_OWNER_DSN",
    "FINERY_APP_DSN",
    "FINERY_SYSTEM_DSN",
    "FINERY_WORKER_SECRET",
    "FINERY_RAY_TOKEN",
    "FINERY_SCORE_MODELS",
)
"""Each child gets the secrets that it needs and no others; Ray's workers inherit none of these."""
_START_SECONDS = 90.0


@dataclass(frozen=True, slots=True)
class Options:
    home: Path
    host: str = "127.0.0.1"
    port: int = 8700
    slots: int | None = None
    tenant: str | None = None


def run(options: Options) -> int:
    """Run until SIGTERM, SIGINT or SIGHUP; the exit status."""
    home = Home(options.home)
    try:
        home.create()
        with home.locked():
            return asyncio.run(Up(home, options).run())
    except (HomeError, embedded.EmbeddedError, SupervisorError, operator_client.OperatorError, OSError) as error:
        print(f"finery-service up: {error}", file=sys.stderr, flush=True)
        return 1


class Up:
    """One run of the system; its home is locked meanwhile."""

    def __init__(self, home: Home, options: Options) -> None:
        self.home, self.options = home, options
        self.secrets = home.secrets()
        self.ports = home.ports(_PORTS)
        if options.port:
            self.ports["api"] = options.port
        local = "127.0.0.1" if options.host in ("0.0.0.0", "::") else options.host  # noqa: S104 compared, not bound
        self.base_url = f"http://{f'[{local}]' if ':' in local else local}:{self.ports['api']}"
        self.keepers: dict[str, Keeper] = {}
        self.state: dict[str, Any] = {
            "ready": False,
            "up": os.getpid(),
            "pids": {},
            "base_url": self.base_url,
            "rpc_address": f"127.0.0.1:{self.ports['rpc']}",
            "ray_address": f"127.0.0.1:{self.ports['ray']}",
        }
        self._asked_to_stop = False

    async def run(self) -> int:
        self.home.write_state(self.state)
        main = asyncio.current_task()
        assert main is not None
        for number in (signal.SIGTERM, signal.SIGINT, signal.SIGHUP):
            # nohup means it; a script's `&` ignores SIGINT too, but who sends one wants the system to stop.
            if number is not signal.SIGHUP or signal.getsignal(number) is not signal.SIG_IGN:
                asyncio.get_running_loop().add_signal_handler(number, self._interrupt, main)
        try:
            await self.bring_up()
            await asyncio.wait([keeper.task for keeper in self.keepers.values()], return_when="FIRST_COMPLETED")
            for keeper in self.keepers.values():
                keeper.check()
        except asyncio.CancelledError:
            if not self._asked_to_stop:
                raise
        finally:
            await self.stop()
        return 0

    async def bring_up(self) -> None:
        started = time.monotonic()
        say(f"Finery starts in {self.home.root} (logs in {self.home.logs})")
        await self._need_api_port()
        cluster = embedded.prepare(self.home.postgres, self.secrets)
        postgres = self._keep(self._postgres(cluster))
        ray = self._keep(self._ray())
        admin_dsn = self._dsn(embedded.ADMIN, "postgres")
        await until(partial(asyncio.to_thread, embedded.answers, admin_dsn), postgres, _START_SECONDS)
        await asyncio.to_thread(embedded.ensure_roles, admin_dsn, self.secrets)
        await run_to_end(self._ours("migrate", FINERY_OWNER_DSN=self._dsn("finery_owner")), _START_SECONDS)
        await self._ensure_operator_key()
        await self._serve(ray)
        if self.options.tenant is not None:
            key = self.home.operator_key.read_text().strip()
            await asyncio.to_thread(
                operator_client.ensure_tenant, self.base_url, key, self.options.tenant, self.home.tenant_key
            )
        self.state["ready"] = True
        self.home.write_state(self.state)
        say(f"Ready after {time.monotonic() - started:.1f} s: {self.base_url}")
        say(f"  operator key: {self.home.operator_key}")
        if self.options.tenant is not None:
            say(f"  key of tenant {self.options.tenant}: {self.home.tenant_key}")

    async def stop(self) -> None:
        """End the children in order; each is killed when it takes too long."""
        say("Finery stops")
        self.state["ready"] = False
        for name in _STOP_ORDER:
            if name in self.keepers:
                await self.keepers[name].stop()
        if "ray" in self.keepers:
            await asyncio.to_thread(ray_head.sweep, ray_head.folder(self.home.root))
        self.home.write_state(self.state)
        say("Finery stopped")

    async def _need_api_port(self) -> None:
        # An API whose supervisor was just killed may take a moment to be gone.
        if not await _eventually(lambda: is_free(self.ports["api"], self.options.host), 5):
            raise SupervisorError(
                f"Port {self.ports['api']} on {self.options.host} is in use: expected it to be free for the API; "
                "stop what listens there, or choose another with --port"
            )

    async def _serve(self, ray: Keeper) -> None:
        """Start api and rpc, then reconcile on top of Ray, and wait until each does its work."""
        epoch = await asyncio.to_thread(self._leader_epoch, 0)
        secrets = {"FINERY_SYSTEM_DSN": self._dsn("finery_system")}
        models = {name: os.environ[name] for name in ("FINERY_SCORE_MODELS",) if name in os.environ}
        api = self._keep(self._ours("api", FINERY_APP_DSN=self._dsn("finery_app"), **secrets, **models))
        secrets["FINERY_WORKER_SECRET"] = self.secrets["worker_secret"]
        rpc = self._keep(self._ours("rpc", **secrets))
        await until(self._listens("ray"), ray, _START_SECONDS)
        reconcile = self._keep(self._ours("reconcile", FINERY_RAY_TOKEN=self.secrets["ray_token"], **secrets, **models))

        async def api_ready() -> bool:
            return await asyncio.to_thread(operator_client.status, f"{self.base_url}/readyz") == 200

        async def leads() -> bool:
            return await asyncio.to_thread(self._leader_epoch, epoch) > epoch

        await until(api_ready, api, _START_SECONDS)
        await until(self._listens("rpc"), rpc, _START_SECONDS)
        await until(leads, reconcile, _START_SECONDS)

    def _keep(self, child: Child) -> Keeper:
        keeper = Keeper(child, changed=self._changed, say=say)
        self.keepers[child.name] = keeper
        keeper.start()
        return keeper

    def _changed(self, name: str, pid: int | None) -> None:
        self.state["pids"][name] = pid
        self.home.write_state(self.state)

    def _interrupt(self, main: asyncio.Task[Any]) -> None:
        if not self._asked_to_stop:  # a second signal does not cut the orderly stop short: that one is bounded
            self._asked_to_stop = True
            main.cancel()

    def _postgres(self, cluster: embedded.Cluster) -> Child:
        return Child(
            name="postgres",
            command=cluster.command(self.ports["postgres"]),
            environment=self._environment(),
            log=self.home.logs / "postgres.log",
            user=cluster.user,
            stop_signal=signal.SIGINT,
            death_signal=signal.SIGINT,
            before=partial(asyncio.to_thread, embedded.wait_for_old_server, cluster.data),
        )

    def _ray(self) -> Child:
        folder = ray_head.folder(self.home.root)
        slots = self.options.slots if self.options.slots is not None else max(1, _gpus())
        return Child(
            name="ray",
            command=ray_head.command(self.ports["ray"], self.ports["ray_client"], slots, folder),
            environment=ray_head.environment(self._environment(), self.secrets["ray_token"]),
            log=self.home.logs / "ray.log",
            folder=ray_head.working_folder(folder),
            stop_seconds=15,
            before=partial(asyncio.to_thread, ray_head.sweep, folder),
        )

    def _ours(self, name: str, **secrets: str) -> Child:
        # -P: never import from the folder that `up` happens to be started in.
        return Child(
            name=name,
            command=[sys.executable, "-P", "-m", "finery_service.main", name],
            environment=self._environment() | secrets,
            log=self.home.logs / f"{name}.log",
        )

    def _environment(self) -> dict[str, str]:
        inherited = {name: value for name, value in os.environ.items() if name not in _NOT_FOR_ALL}
        return inherited | {
            "PYTHONUNBUFFERED": "1",
            "FINERY_STORE_URL": self.home.objects.as_uri(),
            "FINERY_API_HOST": self.options.host,
            "FINERY_API_PORT": str(self.ports["api"]),
            "FINERY_RPC_HOST": "127.0.0.1",
            "FINERY_RPC_PORT": str(self.ports["rpc"]),
            "FINERY_RPC_ADDRESS": self.state["rpc_address"],
            "FINERY_RAY_ADDRESS": self.state["ray_address"],
        }

    def _dsn(self, role: str, database: str = embedded.DATABASE) -> str:
        return embedded.dsn(role, self.secrets[role], self.ports["postgres"], database)

    async def _ensure_operator_key(self) -> None:
        if self.home.operator_key.exists():
            return
        from finery_service.auth import operator_key
        from finery_service.clock import system_clock

        secret = await operator_key.create(self._dsn("finery_system"), "up", system_clock())
        write_private(self.home.operator_key, secret + "\n")

    def _leader_epoch(self, unknown: int) -> int:
        """Epoch of the reconciler that leads now; `unknown` when none does."""
        with psycopg.connect(self._dsn("finery_system"), connect_timeout=5) as connection:
            row = connection.execute("select max(epoch) from leases where expires_at > now()").fetchone()
        return unknown if row is None or row[0] is None else int(row[0])

    def _listens(self, name: str) -> Callable[[], Awaitable[bool]]:
        return partial(_listens, self.ports[name])


async def _listens(port: int) -> bool:
    try:
        _, writer = await asyncio.wait_for(asyncio.open_connection("127.0.0.1", port), 2)
    except (OSError, TimeoutError):
        return False
    writer.close()
    with contextlib.suppress(OSError):
        await writer.wait_closed()
    return True


async def _eventually(condition: Callable[[], bool], seconds: float) -> bool:
    deadline = time.monotonic() + seconds
    while not condition():
        if time.monotonic() > deadline:
            return False
        await asyncio.sleep(0.05)
    return True


def _gpus() -> int:
    return sum(path.name.removeprefix("nvidia").isdigit() for path in Path("/dev").glob("nvidia*"))


def say(line: str) -> None:
    print(line, flush=True)
