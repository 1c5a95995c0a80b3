"""Attempts to get out of the sandbox. Each takes `given` and returns what shows that it got out; what stops it raises,
or leaves nothing to return. All are bounded, so that they can be run outside the sandbox too, where they must succeed.

Sent into the sandbox as text, so it imports nothing but the standard library.
"""

from __future__ import annotations

import ctypes
import errno
import json
import mmap
import os
import platform
import resource
import signal
import socket
import stat
import struct
import subprocess
import sys
import time
from collections.abc import Callable
from typing import Any

Given = dict[str, Any]
NEWNS, NEWUSER, NEWNET = 0x00020000, 0x10000000, 0x40000000
MIB = 2**20
EXPECTED_VARIABLES = {"PATH", "LANG", "HOME", "TMPDIR", "PWD", "LC_CTYPE"}
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


# ---- files


def reads_other_tenants_data(given: Given) -> Any:
    return given["secret"] in read(given["canary"])


def reads_the_passwords(given: Given) -> Any:
    return "root" in read("/etc/shadow")


def reads_the_users(given: Given) -> Any:
    return "root" in read("/etc/passwd")


def reads_our_source(given: Given) -> Any:
    return "sandbox" in read(given["our_source"])


def lists_homes(given: Given) -> Any:
    return [name for name in os.listdir("/root") if name != ".pyenv"] or os.listdir("/home")


def lists_the_working_folder(given: Given) -> Any:
    return os.listdir(given["folder"])


def lists_the_root(given: Given) -> Any:
    return {"boot", "var", "sbin", "sys", "run"} & set(os.listdir("/"))


def lists_temporary_files_of_others(given: Given) -> Any:
    return os.path.basename(given["folder"]) in os.listdir("/tmp")


def follows_a_symlink(given: Given) -> Any:
    link = os.path.join(os.environ["TMPDIR"], "link")
    os.symlink(given["canary"], link)
    return given["secret"] in read(link)


def makes_a_hard_link(given: Given) -> Any:
    link = os.path.join(os.environ["TMPDIR"], "hard")
    os.link(given["canary"], link)
    return given["secret"] in read(link)


def walks_up(given: Given) -> Any:
    return given["secret"] in read(os.path.join(os.environ["TMPDIR"], *[".."] * 20, given["canary"].lstrip("/")))


def writes_where_all_may(given: Given) -> Any:
    path = os.path.join(given["folder"], "written")
    with open(path, "w") as file:
        file.write("x")
    os.unlink(path)
    return True


def writes_to_the_root(given: Given) -> Any:
    path = "/finery-escape"
    with open(path, "w"):
        os.unlink(path)
    return True


def writes_to_the_python(given: Given) -> Any:
    path = os.path.join(os.path.dirname(os.__file__), "finery_escape.py")
    with open(path, "w"):
        os.unlink(path)
    return True


def removes_a_file_of_others(given: Given) -> Any:
    os.rename(given["canary"], given["canary"] + ".moved")
    os.rename(given["canary"] + ".moved", given["canary"])
    return True


def changes_a_mode(given: Given) -> Any:
    os.chmod(given["canary"], 0o644)
    return True


def reads_inherited_descriptors(given: Given) -> Any:
    for fd in range(4, 256):
        try:
            if given["secret"].encode() in os.pread(fd, 1000, 0):
                return fd
        except OSError:
            continue
    return None


def imports_installed_packages(given: Given) -> Any:
    sys.path.extend(given["packages"])
    import numpy

    return numpy.__version__


def runs_a_shell(given: Given) -> Any:
    return subprocess.run(["/bin/sh", "-c", "exit 7"], check=False).returncode == 7


# ---- what others run, and say


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


# ---- the network


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


# ---- becoming more


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


# ---- taking more


def forks_many(given: Given) -> Any:
    children = []
    try:
        for _ in range(64):
            pid = os.fork()
            if pid == 0:
                time.sleep(30)
                os._exit(0)
            children.append(pid)
    finally:
        for pid in children:
            os.kill(pid, signal.SIGKILL)
            os.waitpid(pid, 0)
    return len(children) == 64


def starts_many_threads(given: Given) -> Any:
    import threading

    threading.stack_size(65536)
    over = threading.Event()
    threads = [threading.Thread(target=over.wait, daemon=True) for _ in range(64)]
    try:
        for thread in threads:
            thread.start()
    finally:
        over.set()
    return True


def takes_much_memory(given: Given) -> Any:
    return len(mmap.mmap(-1, 1200 * MIB))


def locks_memory(given: Given) -> Any:
    memory = mmap.mmap(-1, MIB)
    place = ctypes.addressof(ctypes.c_char.from_buffer(memory))
    return libc().mlock(ctypes.c_void_p(place), ctypes.c_size_t(MIB)) == 0


def writes_a_large_file(given: Given) -> Any:
    with open(os.path.join(os.environ["TMPDIR"], "large"), "wb") as file:
        return file.write(bytes(20 * MIB)) == 20 * MIB


def fills_the_disk(given: Given) -> Any:
    for number in range(8):
        with open(os.path.join(os.environ["TMPDIR"], f"part-{number}"), "wb") as file:
            file.write(bytes(10 * MIB))
    return True


def makes_many_files(given: Given) -> Any:
    for number in range(500):
        os.close(os.open(os.path.join(os.environ["TMPDIR"], f"file-{number}"), os.O_CREAT | os.O_WRONLY))
    return True


def opens_many_files(given: Given) -> Any:
    opened: list[int] = []
    try:
        while len(opened) < 300:
            opened.append(os.open("/dev/null", os.O_RDONLY))
    finally:
        for fd in opened:
            os.close(fd)
    return len(opened)


def finds_what_an_earlier_program_left(given: Given) -> Any:
    path = os.path.join(os.environ["TMPDIR"], "left-over")
    found = os.path.exists(path)
    open(path, "w").close()
    return found


ATTEMPTS: dict[str, Callable[[Given], Any]] = {
    name: value
    for name, value in list(globals().items())
    if callable(value) and getattr(value, "__annotations__", {}).get("given") == "Given" and not name.startswith("_")
}


def tried(name: str, given: Given) -> dict[str, Any]:
    """Whether it got out, and what it found or met."""
    try:
        found = ATTEMPTS[name](given)
        return {"escaped": bool(found) or (found == 0 and found is not False), "met": repr(found)[:200]}
    except Unsupported as error:
        return {"escaped": False, "unsupported": True, "met": str(error)}
    except BaseException as error:
        return {"escaped": False, "met": f"{type(error).__name__}: {error}"[:200]}


def clear() -> None:
    import shutil

    for name in os.listdir(os.environ["TMPDIR"]):
        path = os.path.join(os.environ["TMPDIR"], name)
        shutil.rmtree(path) if os.path.isdir(path) and not os.path.islink(path) else os.unlink(path)


def serve() -> None:
    """Answers requests by running each attempt in a process of its own, where there may be one."""
    if len(sys.argv) > 1:  # outside
        os.dup2(int(sys.argv[1]), 3)
    for line in os.fdopen(0, "rb"):
        name, given = json.loads(line)
        if given.get("in_place"):
            reply = json.dumps(tried(name, given)).encode()
            over = True
        else:
            ours, theirs = os.pipe()
            pid = os.fork()
            if pid == 0:
                os.write(theirs, json.dumps(tried(name, given)).encode())
                os._exit(0)
            os.close(theirs)
            reply = os.read(ours, 65536) or b'{"escaped": false, "met": "the process died"}'
            os.close(ours)
            os.waitpid(pid, 0)
            over = name != "finds_what_an_earlier_program_left"
        if over and os.path.isdir(os.environ["TMPDIR"]):
            clear()
        os.write(3, reply + b"\n")


if __name__ == "__main__":
    serve()
