"""What the sandbox stands on: mounts of its own, where they can be had. Standard library only."""

from __future__ import annotations

import os
import stat

from finery_gpu_workers.sandbox import kernel
from finery_gpu_workers.sandbox.plan import Plan

_EMPTY_FOLDERS = ("/mnt", "/srv", "/media", "/opt", "/home")


def prepare(plan: Plan) -> str | None:
    """A mount namespace where one can be had. The folder for the program's files, or None: then it may write none."""
    try:
        _own_mounts(plan)
    except OSError as error:
        _need_no_mounts(plan, error)
        return None
    if plan["uid"] is not None:
        for top, paths in _hidden(plan).items():
            _uncover(top, paths)
    return _temporary_folder(plan)


def folder_of_a_user(plan: Plan) -> str | None:
    """For a process that has become the sandbox's user, where root may not mount: what an ordinary user does."""
    try:
        kernel.prctl(kernel.DUMPABLE, 1)  # else /proc/self is root's since the change of user
        _user_namespace()
    except OSError:
        return None
    return _temporary_folder(plan)


def _temporary_folder(plan: Plan) -> str | None:
    needed = [*plan["read"], plan["python"], plan["bwrap"] or "/"]
    for folder in _EMPTY_FOLDERS:
        if os.path.isdir(folder) and not os.path.islink(folder) and not any(inside(path, folder) for path in needed):
            owner = os.getuid() if plan["uid"] is None else plan["uid"]
            group = os.getgid() if plan["uid"] is None else plan["uid"]
            options = f"size={plan['tmp_bytes']},nr_inodes={plan['tmp_files']},mode=700,uid={owner},gid={group}"
            kernel.mount("tmpfs", folder, "tmpfs", kernel.NOSUID | kernel.NODEV, options)
            return folder
    return None


def _own_mounts(plan: Plan) -> None:
    if os.geteuid() == 0:
        kernel.unshare(kernel.NEWNS)
        kernel.mount(None, "/", None, kernel.REC | kernel.PRIVATE)
    elif plan["backend"] == "bubblewrap":
        _user_namespace()
    else:
        raise OSError("this backend makes no namespaces")


def _user_namespace() -> None:
    uid, gid = os.getuid(), os.getgid()
    kernel.unshare(kernel.NEWUSER | kernel.NEWNS)
    for name, text in (("setgroups", "deny"), ("uid_map", f"{uid} {uid} 1"), ("gid_map", f"{gid} {gid} 1")):
        with open(f"/proc/self/{name}", "w") as file:
            file.write(text)
    kernel.mount(None, "/", None, kernel.REC | kernel.PRIVATE)


def _need_no_mounts(plan: Plan, error: OSError) -> None:
    if plan["uid"] is not None and (hidden := _hidden(plan)):
        paths = ", ".join(path for paths in hidden.values() for path in paths)
        raise OSError(f"{paths}: expected folders that every user may read, and mounts are not allowed ({error})")


def _hidden(plan: Plan) -> dict[str, list[str]]:
    """What an unprivileged user cannot reach, by the topmost folder that stops them."""
    found: dict[str, list[str]] = {}
    for path in [*plan["read"], plan["python"], *([plan["bwrap"]] if plan["bwrap"] else [])]:
        parts = path.split("/")
        for end in range(2, len(parts)):
            top = "/".join(parts[:end])
            if not os.stat(top).st_mode & stat.S_IXOTH:
                found.setdefault(top, []).append(path)
                break
    return found


def _uncover(top: str, paths: list[str]) -> None:
    """Mounts an empty folder over `top` that holds `paths` and nothing else, read-only, for this namespace only."""
    outer = [path for path in paths if not any(path != other and inside(path, other) for other in paths)]
    sources = {path: os.open(path, os.O_PATH) for path in dict.fromkeys(outer)}
    kernel.mount("tmpfs", top, "tmpfs", kernel.NOSUID | kernel.NODEV, "size=1m,mode=755")
    for path, fd in sources.items():
        os.makedirs(path if stat.S_ISDIR(os.fstat(fd).st_mode) else os.path.dirname(path), 0o755, exist_ok=True)
        if not stat.S_ISDIR(os.fstat(fd).st_mode):
            os.close(os.open(path, os.O_CREAT | os.O_WRONLY, 0o444))
        kernel.mount(f"/proc/self/fd/{fd}", path, None, kernel.BIND, None)
        kernel.mount(
            None, path, None, kernel.BIND | kernel.REMOUNT | kernel.RDONLY | kernel.NOSUID | kernel.NODEV, None
        )
        os.close(fd)


def inside(path: str, folder: str) -> bool:
    return path == folder or path.startswith(folder.rstrip("/") + "/")
