"""Attempts at files, and to take more than is given."""

from __future__ import annotations

import ctypes
import mmap
import os
import signal
import subprocess
import sys
import time
from typing import Any

from .escapes_common import MIB, Given, libc, read


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


def watches_the_folder_of_others(given: Given) -> Any:
    notices = libc().inotify_init1(0)
    try:
        return libc().inotify_add_watch(notices, given["folder"].encode(), 0x100) >= 0
    finally:
        os.close(notices)


def runs_a_shell(given: Given) -> Any:
    return subprocess.run(["/bin/sh", "-c", "exit 7"], check=False).returncode == 7


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
