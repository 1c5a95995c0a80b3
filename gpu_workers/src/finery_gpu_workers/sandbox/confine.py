"""Turns a process into a confined program. Standard library only."""

from __future__ import annotations

import fcntl
import os
import resource
import signal
from typing import NoReturn

from finery_gpu_workers.sandbox import kernel
from finery_gpu_workers.sandbox.mounts import folder_of_a_user, inside
from finery_gpu_workers.sandbox.plan import Plan

# Rights of Landlock, include/uapi/linux/landlock.h, and the version of it that each one came with.
_EXECUTE, _WRITE_FILE, _READ_FILE, _READ_DIR, _TRUNCATE, _IOCTL_DEV = (1 << bit for bit in (0, 1, 2, 3, 14, 15))
_BY_VERSION = ((1, (1 << 13) - 1), (2, 1 << 13), (3, _TRUNCATE), (5, _IOCTL_DEV))
_BOTH = 3
"""TCP bind and connect (version 4); abstract sockets and signals (version 6)."""
_TMP = "/tmp"  # noqa: S108 - of the sandbox


def become(plan: Plan, folder: str | None, start: int) -> NoReturn:
    """Turns this process into the confined program."""
    if not os.read(start, 1):
        os._exit(126)  # the keeper is dead
    os.setsid()
    if plan["uid"] is not None:
        os.setgroups([])
        os.setresgid(plan["uid"], plan["uid"], plan["uid"])
        os.setresuid(plan["uid"], plan["uid"], plan["uid"])
    kernel.prctl(kernel.PDEATHSIG, signal.SIGKILL)
    kernel.prctl(kernel.NO_NEW_PRIVS, 1)
    boxed = plan["backend"] == "bubblewrap"
    if boxed and folder is None and plan["uid"] is not None:
        folder = folder_of_a_user(plan)
    _descriptors(plan, boxed)
    for name, value in plan["limits"].items():
        resource.setrlimit(getattr(resource, name), (value, value))
    place = (_TMP if boxed else folder) if folder else "/nowhere"
    environment = {"PATH": "/usr/bin:/bin", "LANG": "C.UTF-8", "HOME": "/", "TMPDIR": place, "PYTHONHASHSEED": "0"}
    if boxed:
        os.execve(str(plan["bwrap"]), _bubblewrap(plan, folder, environment), {})  # noqa: S606 - no shell is wanted
    os.chdir("/")
    _landlock(plan, folder)
    kernel.install_filter(bytes.fromhex(plan["seccomp"]))
    os.execve(plan["argv"][0], plan["argv"], environment)  # noqa: S606


def _descriptors(plan: Plan, boxed: bool) -> None:
    """Leaves open: requests (0), nothing (1, 2), replies (3), for bubblewrap the filter (4); until exec `report`."""
    null = _high(os.open(os.devnull, os.O_RDWR))
    result, plan["report"] = _high(plan["result"]), _high(plan["report"])
    moved = {1: null, 2: null, 3: result}
    if boxed:
        moved[4] = _high(os.memfd_create("filter"))
        os.write(moved[4], bytes.fromhex(plan["seccomp"]))
        os.lseek(moved[4], 0, os.SEEK_SET)
    for to, fd in moved.items():
        os.dup2(fd, to)
    os.closerange(len(moved) + 1, plan["report"])
    os.closerange(plan["report"] + 1, 1 << 16)


def _high(fd: int) -> int:
    return fcntl.fcntl(fd, fcntl.F_DUPFD_CLOEXEC, 100)


def _bubblewrap(plan: Plan, folder: str | None, environment: dict[str, str]) -> list[str]:
    flags = ["--unshare-all", "--unshare-user", "--disable-userns", "--cap-drop", "ALL", "--new-session"]
    flags += ["--die-with-parent", "--as-pid-1", "--clearenv", "--hostname", "sandbox", "--proc", "/proc"]
    flags += ["--dev", "/dev", "--remount-ro", "/dev", "--seccomp", "4"]
    if folder:  # first, as what is to be read may lie below it, in a virtual environment in /tmp
        flags += ["--bind", folder, _TMP]
    for path in plan["read"]:
        if os.path.islink(path):
            flags += ["--symlink", os.readlink(path), path]
        elif os.path.exists(path):
            flags += ["--ro-bind", path, path]
    for path in plan["masked"]:
        if os.path.isdir(path):
            flags += ["--tmpfs", path, "--remount-ro", path]
    flags += ["--remount-ro", "/", "--chdir", "/"]
    for name, value in environment.items():
        flags += ["--setenv", name, value]
    return ["bwrap", *flags, "--", *plan["argv"]]


def _landlock(plan: Plan, folder: str | None) -> None:
    """All file access is handled, so what no rule allows is refused; so are TCP, signals and abstract sockets that
    lead out, where the kernel knows of them."""
    version = kernel.landlock_version()
    if version < 1:
        raise OSError("no Landlock in this kernel")
    handled = sum(bits for since, bits in _BY_VERSION if version >= since)
    words = [handled, *([_BOTH] if version >= 4 else []), *([_BOTH] if version >= 6 else [])]
    ruleset = kernel.landlock_ruleset(words)
    for path in dict.fromkeys(map(os.path.realpath, plan["read"])):
        _allow_reading(ruleset, path, plan["masked"])
    for path in ("/dev/null", "/dev/zero", "/dev/urandom", "/dev/random"):
        kernel.landlock_allow(ruleset, path, (_READ_FILE | _WRITE_FILE) if path == "/dev/null" else _READ_FILE)
    if folder:
        kernel.landlock_allow(ruleset, folder, handled & ~_EXECUTE & ~_IOCTL_DEV)
    kernel.landlock_enforce(ruleset)


def _allow_reading(ruleset: int, path: str, masked: list[str]) -> None:
    """Rules hold for all that is beneath, so folders above a masked one are allowed entry by entry.

    A rule for a symlink would be one for what it points to, which may lie anywhere.
    """
    if path in masked or os.path.islink(path) or not os.path.exists(path):
        return
    if any(inside(mask, path) for mask in masked):
        kernel.landlock_allow(ruleset, path, _READ_DIR)
        for entry in os.listdir(path):
            _allow_reading(ruleset, os.path.join(path, entry), masked)
    else:
        access = _EXECUTE | _READ_FILE | (_READ_DIR if os.path.isdir(path) else 0)
        kernel.landlock_allow(ruleset, path, access)
