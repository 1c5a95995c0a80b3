"""Attempts at what others run and say."""

from __future__ import annotations

import ctypes
import os
import resource
import signal
import struct
from typing import Any

from .escapes_common import EXPECTED_VARIABLES, PIDFD_GETFD, Given, Unsupported, call, libc, read


def reads_the_environment_of_another_process(given: Given) -> Any:
    return given["secret"] in read(f"/proc/{given['victim']}/environ")


def finds_a_secret_in_any_environment(given: Given) -> Any:
    for name in os.listdir("/proc"):
        try:
            if name.isdigit() and given["secret"] in read(f"/proc/{name}/environ"):
                return name
        except OSError:
            continue
    return None


def reads_the_environment_of_process_1(given: Given) -> Any:
    try:
        text = read("/proc/1/environ")
    except PermissionError as error:
        raise Unsupported(str(error)) from error
    variables = {line.partition("=")[0] for line in text.split("\0") if line}
    return variables - EXPECTED_VARIABLES or given["outside"]


def has_secret_variables(given: Given) -> Any:
    return set(os.environ) - EXPECTED_VARIABLES


def sees_another_process(given: Given) -> Any:
    return str(given["victim"]) in os.listdir("/proc")


def reads_the_memory_of_another_process(given: Given) -> Any:
    with open(f"/proc/{given['victim']}/maps") as maps:
        place = int(maps.readline().partition("-")[0], 16)
    with open(f"/proc/{given['victim']}/mem", "rb", buffering=0) as memory:
        memory.seek(place)
        return memory.read(4)


def traces_another_process(given: Given) -> Any:
    attach, detach = 16, 17
    if libc().ptrace(attach, given["victim"], None, None) < 0:
        raise OSError("no ptrace")
    os.waitpid(given["victim"], 0x40000000)
    libc().ptrace(detach, given["victim"], None, None)
    return True


def copies_the_memory_of_another_process(given: Given) -> Any:
    with open(f"/proc/{given['victim']}/maps") as maps:
        place = int(maps.readline().partition("-")[0], 16)
    into = ctypes.create_string_buffer(4)
    local = struct.pack("PN", ctypes.addressof(into), 4)
    remote = struct.pack("PN", place, 4)
    return libc().process_vm_readv(given["victim"], local, 1, remote, 1, 0) == 4


def signals_another_process(given: Given) -> Any:
    os.kill(given["victim"], signal.SIGURG)
    return True


def signals_its_keeper(given: Given) -> Any:
    os.kill(given["keeper"], signal.SIGURG)
    return True


def limits_another_process(given: Given) -> Any:
    limits = resource.prlimit(given["victim"], resource.RLIMIT_NOFILE)
    return resource.prlimit(given["victim"], resource.RLIMIT_NOFILE, limits)


def slows_another_process(given: Given) -> Any:
    os.setpriority(os.PRIO_PROCESS, given["victim"], os.getpriority(os.PRIO_PROCESS, given["victim"]) + 1)
    return True


def moves_another_process(given: Given) -> Any:
    os.sched_setaffinity(given["victim"], os.sched_getaffinity(given["victim"]))
    return True


def takes_a_descriptor_of_another_process(given: Given) -> Any:
    return os.pread(call(PIDFD_GETFD, os.pidfd_open(given["victim"]), given["victims_descriptor"], 0), 100, 0)


def shares_memory_by_key(given: Given) -> Any:
    identity = libc().shmget(0x46494E, 4096, 0o1000 | 0o666)
    if identity < 0:
        raise OSError("no shared memory")
    libc().shmctl(identity, 0, None)
    return True


def shares_memory_by_name(given: Given) -> Any:
    path = "/dev/shm/finery-escape"
    with open(path, "w"):
        os.unlink(path)
    return True


def keeps_memory_in_nameless_files(given: Given) -> Any:
    return os.memfd_create("x")
