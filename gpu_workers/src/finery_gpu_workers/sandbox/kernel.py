"""Calls of the Linux kernel that Python does not have. Standard library only: it runs in the sandbox's keeper."""

from __future__ import annotations

import ctypes
import os
import struct

NEWNS, NEWUSER = 0x00020000, 0x10000000
RDONLY, NOSUID, NODEV, REMOUNT, BIND, REC, PRIVATE = 1, 2, 4, 32, 4096, 16384, 1 << 18
PDEATHSIG, DUMPABLE, SUBREAPER, NO_NEW_PRIVS = 1, 4, 36, 38
_SECCOMP, _FILTER = 22, 2
_CREATE_RULESET, _ADD_RULE, _RESTRICT_SELF = 444, 445, 446
"""Landlock's calls have the same numbers on every machine."""
_VERSION = 1
_PATH_BENEATH = 1

_libc = ctypes.CDLL(None, use_errno=True)


def unshare(flags: int) -> None:
    _check(_libc.unshare(flags), "namespaces")


def mount(source: str | None, target: str, kind: str | None, flags: int, options: str | None = None) -> None:
    values = [None if value is None else value.encode() for value in (source, target, kind, options)]
    _check(_libc.mount(values[0], values[1], values[2], ctypes.c_ulong(flags), values[3]), target)


def prctl(option: int, value: int) -> None:
    _check(_libc.prctl(option, *map(ctypes.c_ulong, (value, 0, 0, 0))), "prctl")


def install_filter(program: bytes) -> None:
    """A seccomp filter, for this process and all that come from it."""

    class Program(ctypes.Structure):
        _fields_ = [("length", ctypes.c_ushort), ("filter", ctypes.c_char_p)]

    given = Program(len(program) // 8, program)
    _check(_libc.prctl(_SECCOMP, ctypes.c_ulong(_FILTER), ctypes.byref(given), 0, 0), "seccomp")


def landlock_version() -> int:
    """0 without Landlock."""
    return max(0, int(_libc.syscall(_CREATE_RULESET, None, ctypes.c_size_t(0), ctypes.c_uint(_VERSION))))


def landlock_ruleset(handled: list[int]) -> int:
    """A descriptor. `handled`: the words of `struct landlock_ruleset_attr`, as many as this version knows."""
    given = struct.pack(f"{len(handled)}Q", *handled)
    return _check(_libc.syscall(_CREATE_RULESET, given, ctypes.c_size_t(len(given)), ctypes.c_uint(0)), "Landlock")


def landlock_allow(ruleset: int, path: str, access: int) -> None:
    fd = os.open(path, os.O_PATH)
    rule = struct.pack("=Qi", access, fd)
    _check(_libc.syscall(_ADD_RULE, ruleset, _PATH_BENEATH, rule, ctypes.c_uint(0)), path)
    os.close(fd)


def landlock_enforce(ruleset: int) -> None:
    _check(_libc.syscall(_RESTRICT_SELF, ruleset, ctypes.c_uint(0)), "Landlock")
    os.close(ruleset)


def _check(result: int, what: str) -> int:
    if result < 0:
        number = ctypes.get_errno()
        raise OSError(number, f"{what}: {os.strerror(number)}")
    return result
