"""The home keeps its secrets and ports, and has one owner."""

from __future__ import annotations

import os
import socket
import stat
import subprocess
import sys
import textwrap
from pathlib import Path

import pytest

from finery_service.home import Home, HomeError, is_free


def test_a_home_has_one_owner_and_its_death_frees_it(tmp_path: Path) -> None:
    home = Home(tmp_path / "home")
    home.create()
    code = textwrap.dedent(f"""
        import time
        from pathlib import Path
        from finery_service.home import Home
        with Home(Path({str(home.root)!r})).locked():
            print("locked", flush=True)
            time.sleep(600)
    """)
    process = subprocess.Popen([sys.executable, "-c", code], stdout=subprocess.PIPE, text=True)
    assert process.stdout is not None
    assert process.stdout.readline() == "locked\n"
    with pytest.raises(HomeError, match=rf"\(pid {process.pid}\) already uses .*home.*--home"), home.locked():
        pass
    process.kill()
    process.wait()
    process.stdout.close()
    with home.locked():
        assert (home.root / "lock").read_text() == str(os.getpid())


def test_secrets_are_made_once_and_are_their_owners_alone(tmp_path: Path) -> None:
    home = Home(tmp_path / "home")
    home.create()
    secrets = home.secrets()
    assert home.secrets() == secrets
    assert len(set(secrets.values())) == len(secrets) == 6
    assert all(len(secret) >= 32 for secret in secrets.values())
    assert stat.S_IMODE((home.root / "secrets.json").stat().st_mode) == 0o600
    (home.root / "secrets.json").write_text("{")
    with pytest.raises(HomeError, match=r"secrets\.json is not valid JSON"):
        home.secrets()


def test_ports_are_kept_until_something_else_takes_one(tmp_path: Path) -> None:
    home = Home(tmp_path / "home")
    home.create()
    ports = home.ports(("a", "b"))
    assert all(20_000 <= port < 32_768 for port in ports.values())
    assert home.ports(("a", "b")) == ports
    with socket.socket() as other:
        other.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)  # an old connection may still be in TIME_WAIT there
        other.bind(("127.0.0.1", ports["a"]))
        other.listen()
        other.listen()
        assert not is_free(ports["a"])
        again = home.ports(("a", "b"))
    assert again["a"] != ports["a"]
    assert again["b"] == ports["b"]
