"""Attempts to become more."""

from __future__ import annotations

import ctypes
import errno
import os
import resource
import signal
import socket
import stat
import struct
from typing import Any

from .escapes_common import (
    CLONE3,
    FSOPEN,
    NEWNET,
    NEWNS,
    NEWUSER,
    OPEN_TREE,
    Given,
    Unsupported,
    call,
    known,
    libc,
    read,
)


def becomes_root(given: Given) -> Any:
    libc().setresuid(0, 0, 0)
    return (os.getuid() == 0 and given["outside"]) or "Uid:\t0\t" in read("/proc/self/status")


def becomes_another_user(given: Given) -> Any:
    os.setresuid(12345, 12345, 12345)
    return os.getuid() == 12345


def makes_a_program_of_another_user(given: Given) -> Any:
    path = os.path.join(os.environ["TMPDIR"], "program")
    with open(path, "w"):
        os.chown(path, 0, 0)
        os.chmod(path, 0o4755)
    return os.stat(path).st_uid == 0 and os.stat(path).st_mode & stat.S_ISUID


def mounts(given: Given) -> Any:
    target = os.path.join(given["folder"], "mountpoint").encode()
    if libc().mount(b"tmpfs", target, b"tmpfs", 0, None) < 0:
        raise OSError("no mount")
    libc().umount2(target, 2)
    return True


def opens_a_file_system(given: Given) -> Any:
    return call(FSOPEN, b"tmpfs", 0)


def copies_a_mount(given: Given) -> Any:
    return call(OPEN_TREE, -100, b"/", 1)


def makes_a_user_namespace(given: Given) -> Any:
    return libc().unshare(NEWUSER) == 0


def makes_a_mount_namespace(given: Given) -> Any:
    return libc().unshare(NEWNS) == 0


def makes_a_network_namespace(given: Given) -> Any:
    return libc().unshare(NEWNET) == 0


def clones_into_a_user_namespace(given: Given) -> Any:
    arguments = struct.pack("8Q", NEWUSER, 0, 0, 0, signal.SIGCHLD, 0, 0, 0)
    pid = call(CLONE3, arguments, ctypes.c_size_t(len(arguments)))
    if pid == 0:
        os._exit(0)
    os.waitpid(pid, 0)
    return True


def changes_its_root(given: Given) -> Any:
    os.chroot("/")
    return True


def joins_a_namespace(given: Given) -> Any:
    fd = os.open(f"/proc/{given['victim']}/ns/net", os.O_RDONLY)
    return libc().setns(fd, 0) == 0


def gets_around_addresses(given: Given) -> Any:
    return known("personality", ctypes.c_ulong(0x0040000)) >= 0


def keeps_keys(given: Given) -> Any:
    return known("add_key", b"user", b"finery", b"x", ctypes.c_size_t(1), -1)


def loads_a_kernel_program(given: Given) -> Any:
    create_map = struct.pack("IIII", 2, 4, 4, 1) + bytes(100)
    return known("bpf", 0, create_map, len(create_map))


def counts_performance(given: Given) -> Any:
    attributes = struct.pack("IIQ", 1, 112, 0) + bytes(96)
    try:
        return known("perf_event_open", attributes, 0, -1, -1, 0)
    except OSError as error:
        if error.errno in (errno.ENOSYS, errno.ENOENT):
            raise Unsupported(str(error)) from error
        raise


def handles_page_faults(given: Given) -> Any:
    try:
        return known("userfaultfd", 0)
    except OSError as error:
        if error.errno == errno.ENOSYS:
            raise Unsupported(str(error)) from error
        raise


def opens_a_device(given: Given) -> Any:
    found = []
    for name in ("kmsg", "mem", "vda", "sda", "loop-control", "net/tun", "fuse", "kvm", "nvidia0"):
        try:
            os.close(os.open(f"/dev/{name}", os.O_RDONLY))
            found.append(name)
        except OSError:
            continue
    return found


def makes_a_device(given: Given) -> Any:
    path = os.path.join(os.environ["TMPDIR"], "null")
    os.mknod(path, stat.S_IFCHR | 0o666, os.makedev(1, 3))
    return True


def reads_the_kernel(given: Given) -> Any:
    return os.listdir("/sys/kernel")


def opens_a_setting_of_the_kernel(given: Given) -> Any:
    os.close(os.open("/proc/sys/kernel/hostname", os.O_WRONLY))
    return True


def renames_the_machine(given: Given) -> Any:
    name = socket.gethostname().encode()
    return libc().sethostname(name, len(name)) == 0


def takes_priority(given: Given) -> Any:
    os.setpriority(os.PRIO_PROCESS, 0, -5)
    return True


def raises_its_limits(given: Given) -> Any:
    soft, hard = resource.getrlimit(resource.RLIMIT_MSGQUEUE)
    try:
        resource.setrlimit(resource.RLIMIT_MSGQUEUE, (soft, hard + 1))
    except ValueError as error:
        raise Unsupported(str(error)) from error  # without CAP_SYS_RESOURCE nobody may
    return True
