"""Attempts at the network."""

from __future__ import annotations

import ctypes
import errno
import socket
from typing import Any

from .escapes_common import IO_URING_SETUP, Given, Unsupported, call


def _made(family: int, kind: int = socket.SOCK_STREAM, protocol: int = 0) -> socket.socket:
    try:
        return socket.socket(family, kind, protocol)
    except OSError as error:
        if error.errno in (errno.EAFNOSUPPORT, errno.EPROTONOSUPPORT, errno.ESOCKTNOSUPPORT):
            raise Unsupported(str(error)) from error
        raise


def reaches_a_server_on_this_machine(given: Given) -> Any:
    with _made(socket.AF_INET) as sock:
        sock.connect(("127.0.0.1", given["port"]))
    return True


def reaches_a_server_by_ipv6(given: Given) -> Any:
    with _made(socket.AF_INET6) as sock:
        return sock.connect_ex(("::1", given["port"])) in (0, errno.ECONNREFUSED)


def sends_a_datagram(given: Given) -> Any:
    with _made(socket.AF_INET, socket.SOCK_DGRAM) as sock:
        return sock.sendto(b"x", ("127.0.0.1", given["port"]))


def asks_the_metadata_server(given: Given) -> Any:
    with _made(socket.AF_INET) as sock:
        sock.setblocking(False)
        return sock.connect_ex(("169.254.169.254", 80)) in (0, errno.EINPROGRESS, errno.ENETUNREACH, errno.EHOSTUNREACH)


def asks_a_name_server(given: Given) -> Any:
    with _made(socket.AF_INET, socket.SOCK_DGRAM) as sock:
        sock.setblocking(False)
        return sock.connect_ex(("1.1.1.1", 53)) in (0, errno.ENETUNREACH, errno.EHOSTUNREACH)


def listens(given: Given) -> Any:
    with _made(socket.AF_INET) as sock:
        sock.bind(("127.0.0.1", 0))
        sock.listen()
    return True


def reaches_a_socket_by_path(given: Given) -> Any:
    with _made(socket.AF_UNIX) as sock:
        sock.connect(given["unix_path"])
    return True


def reaches_an_abstract_socket(given: Given) -> Any:
    with _made(socket.AF_UNIX) as sock:
        sock.connect("\0" + given["unix_name"])
    return True


def sends_by_a_pair_to_a_path(given: Given) -> Any:
    ours, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_DGRAM)
    with ours, theirs:
        return ours.sendto(b"x", given["datagram_path"])


def opens_a_netlink_socket(given: Given) -> Any:
    return _made(socket.AF_NETLINK, socket.SOCK_RAW).fileno()


def opens_a_packet_socket(given: Given) -> Any:
    return _made(socket.AF_PACKET, socket.SOCK_RAW, 3).fileno()


def opens_a_raw_socket(given: Given) -> Any:
    return _made(socket.AF_INET, socket.SOCK_RAW, socket.IPPROTO_ICMP).fileno()


def opens_a_vsock(given: Given) -> Any:
    return _made(40).fileno()


def opens_a_crypto_socket(given: Given) -> Any:
    return _made(38, socket.SOCK_SEQPACKET).fileno()


def opens_a_ring(given: Given) -> Any:
    try:
        return call(IO_URING_SETUP, 4, ctypes.create_string_buffer(256))
    except OSError as error:
        if error.errno == errno.ENOSYS:
            raise Unsupported(str(error)) from error
        raise
