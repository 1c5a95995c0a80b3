"""The folder of an embedded installation: its secrets, ports, lock and state. Linux and macOS."""

from __future__ import annotations

import contextlib
import fcntl
import json
import os
import random
import secrets
import socket
import tempfile
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

_PORTS = range(20_000, 32_768)  # above Ray's worker ports (10002–19999), below the ports of outgoing connections
_SECRETS = ("finery_admin", "finery_owner", "finery_app", "finery_system", "worker_secret", "ray_token")


class HomeError(Exception):
    """The home folder cannot be used; the message says why and what to do."""


@dataclass(frozen=True, slots=True)
class Home:
    """Where everything lies. `secrets.json`, `operator.key` and `tenant.key` are readable by their owner only."""

    root: Path

    @property
    def postgres(self) -> Path:
        return self.root / "postgres"

    @property
    def objects(self) -> Path:
        return self.root / "objects"

    @property
    def logs(self) -> Path:
        return self.root / "logs"

    @property
    def operator_key(self) -> Path:
        return self.root / "operator.key"

    @property
    def tenant_key(self) -> Path:
        return self.root / "tenant.key"

    @property
    def state(self) -> Path:
        return self.root / "state.json"

    def create(self) -> None:
        # Others may pass (root's PostgreSQL runs as an unprivileged user) but not list.
        self.root.mkdir(mode=0o711, parents=True, exist_ok=True)
        for folder in (self.objects, self.logs):
            folder.mkdir(mode=0o700, exist_ok=True)

    @contextlib.contextmanager
    def locked(self) -> Iterator[None]:
        """Held while we live (the kernel frees it, whatever ends us); `HomeError` when another process holds it."""
        with (self.root / "lock").open("a+") as file:
            try:
                fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
            except BlockingIOError:
                file.seek(0)
                raise HomeError(
                    f"`finery-service up` (pid {file.read().strip()}) already uses {self.root}: "
                    "stop it first, or give this one another folder with --home"
                ) from None
            file.truncate(0)
            file.write(str(os.getpid()))
            file.flush()
            yield

    def secrets(self) -> dict[str, str]:
        """Passwords by role, `worker_secret` and `ray_token`; generated once, kept in `secrets.json`."""
        path = self.root / "secrets.json"
        known: dict[str, str] = _read_json(path)
        missing = {name: secrets.token_hex(32) for name in _SECRETS if name not in known}
        if missing:
            known |= missing
            write_private(path, json.dumps(known, indent=1))
        return known

    def ports(self, names: tuple[str, ...]) -> dict[str, int]:
        """One port a name, kept in `ports.json`; one that something else took in the meantime is replaced."""
        path = self.root / "ports.json"
        known: dict[str, int] = _read_json(path)
        chosen: dict[str, int] = {}
        for name in names:
            port = known.get(name)
            chosen[name] = port if port is not None and is_free(port) else free_port(set(chosen.values()))
        write_private(path, json.dumps(known | chosen, indent=1))
        return chosen

    def write_state(self, state: Mapping[str, Any]) -> None:
        """Replace `state.json` at once: a reader sees the old one or the new one. No secrets."""
        write_private(self.state, json.dumps(state, indent=1))


def default_home() -> Path:
    if os.environ.get("FINERY_HOME"):
        return Path(os.environ["FINERY_HOME"])
    return Path("/var/lib/finery") if os.geteuid() == 0 else Path.home() / ".local" / "share" / "finery"


def write_private(path: Path, text: str) -> None:
    """Atomically, mode 0600."""
    descriptor, temporary = tempfile.mkstemp(prefix=f".{path.name}-", dir=path.parent)
    try:
        with os.fdopen(descriptor, "w", encoding="utf-8") as file:
            file.write(text)
            file.flush()
            os.fsync(file.fileno())
        Path(temporary).replace(path)
    except BaseException:
        Path(temporary).unlink(missing_ok=True)
        raise


def is_free(port: int, host: str = "127.0.0.1") -> bool:
    """Whether we could listen there now."""
    with socket.socket() as probe:
        probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        try:
            probe.bind((host, port))
        except OSError:
            return False
    return True


def free_port(taken: set[int] | None = None) -> int:
    """A port on which nothing listens; another process may still take it before the caller does."""
    for port in random.sample(_PORTS, 200):
        if port not in (taken or ()) and is_free(port):
            return port
    raise OSError("expected a free port between 20000 and 32767 on 127.0.0.1, found none in 200 tries")


def _read_json(path: Path) -> Any:
    try:
        return json.loads(path.read_text(encoding="utf-8"))
    except FileNotFoundError:
        return {}
    except ValueError as error:
        raise HomeError(f"{path} is not valid JSON ({error}): restore it from a backup") from None
