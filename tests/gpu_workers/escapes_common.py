"""What attempts to get out of the sandbox share."""

from __future__ import annotations

import ctypes
import os
import platform
from typing import Any

Given = dict[str, Any]
NEWNS, NEWUSER, NEWNET = 0x00020000, 0x10000000, 0x40000000
MIB = 2**20
EXPECTED_VARIABLES = {"PATH", "LANG", "HOME", "TMPDIR", "PWD", "LC_CTYPE", "PYTHONHASHSEED"}
NUMBERS = {
    "x86_64": {"add_key": 248, "bpf": 321, "perf_event_open": 298, "userfaultfd": 323, "personality": 135},
    "aarch64": {"add_key": 217, "bpf": 280, "perf_event_open": 241, "userfaultfd": 282, "personality": 92},
}
CLONE3, IO_URING_SETUP, OPEN_TREE, FSOPEN, PIDFD_GETFD = 435, 425, 428, 430, 438


class Unsupported(Exception):  # noqa: N818
    """This machine cannot do it, sandbox or not."""


def libc() -> Any:
    return ctypes.CDLL(None, use_errno=True)


def call(number: int, *arguments: Any) -> int:
    result = int(libc().syscall(number, *arguments))
    if result < 0:
        raise OSError(ctypes.get_errno(), os.strerror(ctypes.get_errno()))
    return result


def known(name: str, *arguments: Any) -> int:
    return call(NUMBERS[platform.machine()][name], *arguments)


def read(path: str) -> str:
    with open(path, "rb") as file:
        return file.read(100_000).decode("utf-8", "replace")
