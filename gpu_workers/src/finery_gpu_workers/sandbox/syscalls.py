"""The seccomp filter: what code in the sandbox may not even ask of the kernel.

Everything else is allowed, as programs that customers bring need much; what these calls would reach is closed by other
means too where the kernel has them. A refused call fails with EPERM, so that the code sees an ordinary error; `clone3`
with ENOSYS, after which the C library takes `clone`, whose flags a filter can see.
"""

from __future__ import annotations

import errno
import os
from functools import lru_cache
from typing import Any

from finery_gpu_workers.sandbox.limits import SandboxUnavailable

_REFUSED = (
    # the network, and rings that would open it past this filter
    *("socket", "connect", "bind", "listen", "accept", "accept4", "io_uring_setup", "io_uring_enter"),
    # other processes
    *("ptrace", "process_vm_readv", "process_vm_writev", "pidfd_getfd", "pidfd_send_signal", "kcmp", "process_madvise"),
    # mounts and namespaces
    *("mount", "umount2", "pivot_root", "chroot", "unshare", "setns", "fsopen", "fsmount", "fsconfig", "fspick"),
    *("move_mount", "open_tree", "open_tree_attr", "mount_setattr", "statmount", "listmount"),
    # what others do with files; Landlock knows only what is opened
    *("open_by_handle_at", "name_to_handle_at", "fanotify_init", "inotify_add_watch"),
    # memory that limits on processes do not count
    *("memfd_create", "memfd_secret", "shmget", "shmat", "msgget", "semget", "mq_open", "mlock", "mlockall"),
    # the kernel's own machinery
    *("bpf", "perf_event_open", "userfaultfd", "keyctl", "add_key", "request_key", "kexec_load", "kexec_file_load"),
    *("init_module", "finit_module", "delete_module", "reboot", "swapon", "swapoff", "acct", "quotactl", "syslog"),
    *("iopl", "ioperm", "settimeofday", "clock_settime", "clock_adjtime", "adjtimex", "sethostname", "setdomainname"),
    *("lookup_dcookie", "vhangup", "personality", "mbind", "set_mempolicy", "migrate_pages", "move_pages"),
    *("setuid", "setgid", "setreuid", "setregid", "setresuid", "setresgid", "setgroups"),
)
_SIGNALS = ("kill", "tkill", "tgkill", "rt_sigqueueinfo", "rt_tgsigqueueinfo")
_PRIORITIES = (
    *("setpriority", "ioprio_set", "sched_setaffinity", "sched_setparam", "sched_setscheduler", "sched_setattr"),
)
"""Of any process of the same user."""
_FORKS = ("fork", "vfork", "clone")
_ATTRIBUTES = (
    *("chmod", "fchmod", "fchmodat", "fchmodat2", "chown", "lchown", "fchown", "fchownat", "utime", "utimes"),
    *("truncate", "utimensat", "futimesat", "setxattr", "lsetxattr", "fsetxattr", "setxattrat", "removexattr"),
    *("lremovexattr", "fremovexattr", "removexattrat", "file_setattr", "mknod", "mknodat"),
)
"""Landlock leaves the attributes of a user's own files alone, wherever they are; before its version 3, lengths too."""
_NEWER = {
    "fchmodat2": 452,
    "statmount": 457,
    "listmount": 458,
    "setxattrat": 463,
    "removexattrat": 466,
    "open_tree_attr": 467,
    "file_setattr": 469,
}
"""Numbers, the same on every machine, of calls that libseccomp may be too old to know."""
_UNIX, _DATAGRAM, _RAW = 1, 2, 3
_SET_OWNER, _SET_SIGNAL, _SET_OWNER_EX, _SET_OWNER_BY_IOCTL = 8, 10, 15, 0x8901
_NEW_NAMESPACE = 0x7E020080
"""CLONE_NEWTIME, NEWNS, NEWCGROUP, NEWUTS, NEWIPC, NEWUSER, NEWPID and NEWNET."""
_TIOCSTI, _TIOCLINUX = 0x5412, 0x541C


@lru_cache
def seccomp_filter(*, alone: bool) -> bytes:
    """As BPF for `prctl` and bubblewrap. `alone`: no signals, no limits and priorities of others, no further processes
    and threads and no changes of files' attributes either, for where the code has no user and no process namespace of
    its own.

    Raises SandboxUnavailable without libseccomp.
    """
    try:
        import pyseccomp  # type: ignore[import-untyped]
    except (ImportError, RuntimeError, OSError) as error:
        raise SandboxUnavailable(f"seccomp: expected pyseccomp and libseccomp.so.2, found {error}") from error
    refused = pyseccomp.ERRNO(errno.EPERM)
    rules = pyseccomp.SyscallFilter(pyseccomp.ALLOW)
    for name in (*_REFUSED, *(_SIGNALS + _PRIORITIES + _FORKS + _ATTRIBUTES if alone else ())):
        _add(rules, refused, name)
    _only_streams(rules, refused)
    if alone:
        _nothing_of_others(rules, refused)
    else:
        for bit in (1 << n for n in range(32) if _NEW_NAMESPACE >> n & 1):
            rules.add_rule(refused, "clone", pyseccomp.Arg(0, pyseccomp.MASKED_EQ, bit, bit))
    rules.add_rule(pyseccomp.ERRNO(errno.ENOSYS), "clone3")
    for request in (_TIOCSTI, _TIOCLINUX):
        rules.add_rule(refused, "ioctl", pyseccomp.Arg(1, pyseccomp.MASKED_EQ, 0xFFFFFFFF, request))
    return _exported(rules)


def _only_streams(rules: Any, refused: int) -> None:
    """A pair of sockets is a way between two processes, but one of datagrams can send to any socket that has a path."""
    from pyseccomp import EQ, MASKED_EQ, NE, Arg

    rules.add_rule(refused, "socketpair", Arg(0, NE, _UNIX))
    for kind in (_DATAGRAM, _RAW):
        rules.add_rule(refused, "socketpair", Arg(0, EQ, _UNIX), Arg(1, MASKED_EQ, 0xF, kind))


def _nothing_of_others(rules: Any, refused: int) -> None:
    """Limits of another process end it, and so do the signals that a descriptor sends to its owner."""
    from pyseccomp import MASKED_EQ, NE, Arg

    rules.add_rule(refused, "prlimit64", Arg(0, NE, 0))
    for order in (_SET_OWNER, _SET_SIGNAL, _SET_OWNER_EX):
        rules.add_rule(refused, "fcntl", Arg(1, MASKED_EQ, 0xFFFFFFFF, order))
    rules.add_rule(refused, "ioctl", Arg(1, MASKED_EQ, 0xFFFFFFFF, _SET_OWNER_BY_IOCTL))


def _add(rules: Any, action: int, name: str) -> None:
    """An older libseccomp does not know the newest calls, nor every machine the oldest."""
    try:
        rules.add_rule(action, _number(name))
    except (ValueError, OSError, RuntimeError):
        if name in ("socket", "ptrace", "unshare", "mount", "clone"):
            raise


def _number(name: str) -> int | str:
    import pyseccomp

    unknown = pyseccomp.resolve_syscall(pyseccomp.Arch.NATIVE, name) == -1
    return _NEWER[name] if unknown and name in _NEWER else name


def _exported(rules: Any) -> bytes:
    fd = os.memfd_create("filter")
    with os.fdopen(fd, "w+b") as file:
        rules.export_bpf(file)
        file.seek(0)
        return file.read()
