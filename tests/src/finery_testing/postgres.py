"""Real PostgreSQL for tests: one server a session, one migrated template, a fresh copy for whoever asks.

Only durability is off (fsync); everything else is the embedded server of `finery-service up`.
"""

from __future__ import annotations

import itertools
import secrets
import shutil
import signal
import subprocess
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path

import psycopg
from psycopg import sql

from finery_service.db import embedded, migrate
from finery_service.home import free_port

_TEMPLATE = "finery_template"
_OPTIONS = {"fsync": "off", "synchronous_commit": "off", "full_page_writes": "off", "shared_buffers": "64MB"}


@dataclass(frozen=True)
class Database:
    """A database of its own, migrated and empty but for the seed rows of the migrations."""

    name: str
    owner_dsn: str = field(repr=False)
    app_dsn: str = field(repr=False)
    system_dsn: str = field(repr=False)
    admin_dsn: str = field(repr=False)
    """As superuser: for tests about roles only."""


class TestServer:
    """A running embedded server with a migrated template."""

    __test__ = False

    def __init__(self, folder: Path, port: int, passwords: dict[str, str]) -> None:
        self.folder, self.port, self._passwords = folder, port, passwords
        self._numbers = itertools.count(1)

    def dsn(self, role: str, database: str) -> str:
        return embedded.dsn(role, self._passwords[role], self.port, database)

    @contextmanager
    def database(self, *, migrated: bool = True) -> Iterator[Database]:
        """A fresh database, dropped at the end (connections left open are cut)."""
        name = f"test_{next(self._numbers)}"
        self._admin_do(lambda admin: embedded.create_database(admin, name, _TEMPLATE if migrated else "template1"))
        owner, app, system = (self.dsn(role, name) for role in embedded.ROLES)
        try:
            yield Database(name, owner, app, system, self.dsn(embedded.ADMIN, name))
        finally:
            drop = sql.SQL("drop database {} with (force)").format(sql.Identifier(name))
            self._admin_do(lambda admin: admin.execute(drop))

    def _admin_do(self, action: object) -> None:
        assert callable(action)
        with psycopg.connect(self.dsn(embedded.ADMIN, "postgres"), autocommit=True) as admin:
            action(admin)

    def make_template(self) -> None:
        admin_dsn = self.dsn(embedded.ADMIN, "postgres")
        embedded.ensure_roles(admin_dsn, self._passwords)
        self._admin_do(lambda admin: embedded.create_database(admin, _TEMPLATE))
        migrate.upgrade(self.dsn("finery_owner", _TEMPLATE))


@contextmanager
def running_server() -> Iterator[TestServer]:
    """Start a server in a temporary folder, yield it, stop it and remove the folder."""
    folder = Path(tempfile.mkdtemp(prefix="finery-test-"))
    folder.chmod(0o711)  # root's server runs as nobody
    passwords = {role: secrets.token_urlsafe(16) for role in (embedded.ADMIN, *embedded.ROLES)}
    try:
        cluster = embedded.prepare(folder / "postgres", passwords)
        port = free_port()
        with (folder / "log").open("wb") as log:
            command = embedded.dies_with_us(cluster.command(port, _OPTIONS), signal.SIGINT, cluster.user)
            process = subprocess.Popen(command, stdout=log, stderr=log)
        try:
            server = TestServer(folder, port, passwords)
            embedded.wait_ready(server.dsn(embedded.ADMIN, "postgres"), process)
            server.make_template()
            yield server
        finally:
            process.send_signal(signal.SIGINT)
            process.wait(30)
    finally:
        shutil.rmtree(folder, ignore_errors=True)
