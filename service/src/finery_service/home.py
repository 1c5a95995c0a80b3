"""The folder of an embedded installation: its secrets, ports, lock and state."""

from __future__ import annotations

import random
import socket

_PORTS = range(20_000, 32_768)  # above Ray's worker ports (10002–19999), below the ports of outgoing connections


def is_free(port: int, host: str = "127.0.0.1") -> bool:
    with socket.socket() as probe:
        probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        try:
            probe.bind((host, port))
        except OSError:
            return False
    return True


def free_port() -> int:
    """A port on which nothing listens; another process may still take it before the caller does."""
    ports = random.sample(_PORTS, 200)
    for port in ports:
        if is_free(port):
            return port
    raise OSError("no free port between 20000 and 32767 on 127.0.0.1")
