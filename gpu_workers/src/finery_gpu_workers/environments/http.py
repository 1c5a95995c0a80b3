"""One POST of JSON with a deadline that holds whatever the server does. Redirects are not followed, proxies not used.

The names of hosts are resolved by the machine, whose resolver has a time limit of its own.
"""

from __future__ import annotations

import contextlib
import http.client
import json
import socket
import ssl
import threading
import time
from collections.abc import Mapping
from contextlib import suppress
from typing import Any
from urllib.parse import urlsplit

_CHUNK = 65536


class UnreachableError(Exception):
    """No whole answer came; trying again may help."""


class OverdueError(Exception):
    """No whole answer came by the deadline."""


class Post:
    """`send` may be ended from another thread by `interrupt`."""

    def __init__(self, url: str, headers: Mapping[str, str], *, max_bytes: int) -> None:
        parts = urlsplit(url)
        if parts.scheme not in ("http", "https") or not parts.hostname:
            raise ValueError("expected an http or https URL with a host")
        self._https, self._host, self._port = parts.scheme == "https", parts.hostname, parts.port
        self._target = parts.path + (f"?{parts.query}" if parts.query else "")
        self._headers = {"Content-Type": "application/json", "Accept": "application/json", **headers}
        self._max_bytes = max_bytes
        self._socket: socket.socket | None = None
        """The connection's own, also while TLS begins."""
        self._over = threading.Event()

    def send(self, body: Any, deadline: float) -> tuple[int, bytes]:
        """Status and body, of which no more than `max_bytes` + 1 bytes are read. `deadline` by time.monotonic.

        Raises UnreachableError, OverdueError.
        """
        self._over.clear()
        left = deadline - time.monotonic()
        if left <= 0:
            raise OverdueError
        timer = threading.Timer(left, self.interrupt)
        timer.daemon = True
        timer.start()
        try:
            return self._exchange(json.dumps(body).encode(), deadline)
        except (OSError, http.client.HTTPException, ValueError) as error:
            if self._over.is_set() or time.monotonic() >= deadline:
                raise OverdueError from None
            raise UnreachableError(type(error).__name__) from None
        finally:
            timer.cancel()
            if self._socket is not None:
                self._socket.close()
                self._socket = None

    def interrupt(self) -> None:
        self._over.set()
        if (sock := self._socket) is not None:
            with suppress(OSError):
                sock.shutdown(socket.SHUT_RDWR)

    def _exchange(self, body: bytes, deadline: float) -> tuple[int, bytes]:
        connection = http.client.HTTPConnection(self._host, self._port)
        sock = self._connected(deadline)
        with contextlib.closing(connection):
            connection.sock = sock
            if self._https:
                connection.sock = ssl.create_default_context().wrap_socket(sock, server_hostname=self._host)
            return self._answer(connection, body)

    def _connected(self, deadline: float) -> socket.socket:
        """To the first of the host's addresses that answers; all within the deadline."""
        failed: OSError = OSError("no address")
        port = self._port or (443 if self._https else 80)
        for family, kind, protocol, _, address in socket.getaddrinfo(self._host, port, type=socket.SOCK_STREAM):
            left = deadline - time.monotonic()
            if left <= 0:
                raise TimeoutError
            sock = socket.socket(family, kind, protocol)
            sock.settimeout(left)
            try:
                sock.connect(address)
            except OSError as error:
                sock.close()
                failed = error
                continue
            self._socket = sock.dup()
            return sock
        raise failed

    def _answer(self, connection: http.client.HTTPConnection, body: bytes) -> tuple[int, bytes]:
        connection.request("POST", self._target, body, self._headers)
        response = connection.getresponse()
        received = b""
        while len(received) <= self._max_bytes and (chunk := response.read1(_CHUNK)):
            received += chunk
        if self._over.is_set():
            raise TimeoutError
        if response.length and len(received) <= self._max_bytes:
            raise http.client.IncompleteRead(b"")
        return response.status, received
