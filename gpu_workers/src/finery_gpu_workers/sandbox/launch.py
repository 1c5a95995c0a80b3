"""Builds the sandbox around a program, watches it and ends it. A program of its own, with the standard library only:
`python -I -S launch.py <plan as JSON>`.

It stays outside as the sandbox's keeper: it ends everything inside when the pipe `lifeline` closes (its parent closed
it, or is dead), when the memory of all processes together exceeds the plan's, or when the program ends; whatever the
program forked, and however it detached itself, is killed and reaped before the keeper ends. Last it writes to `report`
how the program ended and the CPU seconds of all that ran.
"""

import ctypes
import fcntl
import json
import os
import resource
import select
import signal
import stat
import struct
import sys

_LIBC = ctypes.CDLL(None, use_errno=True)
_NEWNS, _NEWUSER = 0x00020000, 0x10000000
_RDONLY, _NOSUID, _NODEV, _REMOUNT, _BIND, _REC, _PRIVATE = 1, 2, 4, 32, 4096, 16384, 1 << 18
_PDEATHSIG, _DUMPABLE, _SUBREAPER, _NO_NEW_PRIVS, _SECCOMP = 1, 4, 36, 38, 22
_EMPTY_FOLDERS = ("/mnt", "/srv", "/media", "/opt", "/home")
_WATCH_SECONDS = 0.1
_PATIENCE_SECONDS = 5.0


def main(plan):
    _prctl(_SUBREAPER, 1)
    folder = _prepare(plan)
    start, go = os.pipe()
    child = os.fork()
    if child == 0:
        try:
            os.close(go)
            _become(plan, folder, start)
        except BaseException as error:
            os.write(plan["report"], json.dumps({"failed": f"{type(error).__name__}: {error}"}).encode())
        os._exit(126)
    os.close(start)
    for fd in (0, plan["result"]):
        os.close(fd)
    os.write(go, b"1")
    why, status = _watch(plan, child)
    used = resource.getrusage(resource.RUSAGE_CHILDREN)
    cpu = used.ru_utime + used.ru_stime + (0 if why == "ended" else _running_cpu(child))
    _kill_all(plan["uid"], child)
    os.write(plan["report"], json.dumps({"why": why, "status": status, "cpu": cpu}).encode())


# ---- outside: what the sandbox stands on


def _prepare(plan):
    """A mount namespace where one can be had. The folder for the program's files, or None: then it may write none."""
    try:
        _own_mounts(plan)
    except OSError as error:
        _need_no_mounts(plan, error)
        return None
    if plan["uid"] is not None:
        for top, paths in _hidden(plan).items():
            _uncover(top, paths)
    needed = [*plan["read"], plan["python"], plan["bwrap"] or "/"]
    for folder in _EMPTY_FOLDERS:
        if os.path.isdir(folder) and not os.path.islink(folder) and not any(_inside(path, folder) for path in needed):
            owner = os.getuid() if plan["uid"] is None else plan["uid"]
            group = os.getgid() if plan["uid"] is None else plan["uid"]
            options = f"size={plan['tmp_bytes']},nr_inodes={plan['tmp_files']},mode=700,uid={owner},gid={group}"
            _mount("tmpfs", folder, "tmpfs", _NOSUID | _NODEV, options)
            return folder
    return None


def _own_mounts(plan):
    if os.geteuid() == 0:
        _check(_LIBC.unshare(_NEWNS))
    elif plan["backend"] == "bubblewrap":
        uid, gid = os.getuid(), os.getgid()
        _check(_LIBC.unshare(_NEWUSER | _NEWNS))
        for name, text in (("setgroups", "deny"), ("uid_map", f"{uid} {uid} 1"), ("gid_map", f"{gid} {gid} 1")):
            with open(f"/proc/self/{name}", "w") as file:
                file.write(text)
    else:
        raise OSError("this backend makes no namespaces")
    _mount(None, "/", None, _REC | _PRIVATE, None)


def _need_no_mounts(plan, error):
    if plan["uid"] is not None and (hidden := _hidden(plan)):
        paths = ", ".join(path for paths in hidden.values() for path in paths)
        raise OSError(f"{paths}: expected folders that every user may read, and mounts are not allowed ({error})")


def _hidden(plan):
    """What an unprivileged user cannot reach, by the topmost folder that stops them."""
    found = {}
    for path in [*plan["read"], plan["python"], *([plan["bwrap"]] if plan["bwrap"] else [])]:
        parts = path.split("/")
        for end in range(2, len(parts)):
            top = "/".join(parts[:end])
            if not os.stat(top).st_mode & stat.S_IXOTH:
                found.setdefault(top, []).append(path)
                break
    return found


def _uncover(top, paths):
    """Mounts an empty folder over `top` that holds `paths` and nothing else, read-only, for this namespace only."""
    outer = [path for path in paths if not any(path != other and _inside(path, other) for other in paths)]
    sources = {path: os.open(path, os.O_PATH) for path in dict.fromkeys(outer)}
    _mount("tmpfs", top, "tmpfs", _NOSUID | _NODEV, "size=1m,mode=755")
    for path, fd in sources.items():
        os.makedirs(path if stat.S_ISDIR(os.fstat(fd).st_mode) else os.path.dirname(path), 0o755, exist_ok=True)
        if not stat.S_ISDIR(os.fstat(fd).st_mode):
            os.close(os.open(path, os.O_CREAT | os.O_WRONLY, 0o444))
        _mount(f"/proc/self/fd/{fd}", path, None, _BIND, None)
        _mount(None, path, None, _BIND | _REMOUNT | _RDONLY | _NOSUID | _NODEV, None)
        os.close(fd)


def _inside(path, folder):
    return path == folder or path.startswith(folder.rstrip("/") + "/")


# ---- inside


def _become(plan, folder, start):
    """Turns this process into the confined program."""
    if not os.read(start, 1):
        os._exit(126)  # the keeper is dead
    os.setsid()
    if plan["uid"] is not None:
        os.setgroups([])
        os.setresgid(plan["uid"], plan["uid"], plan["uid"])
        os.setresuid(plan["uid"], plan["uid"], plan["uid"])
    _prctl(_PDEATHSIG, signal.SIGKILL)
    _prctl(_NO_NEW_PRIVS, 1)
    boxed = plan["backend"] == "bubblewrap"
    _descriptors(plan, boxed)
    for name, value in plan["limits"].items():
        resource.setrlimit(getattr(resource, name), (value, value))
    place = ("/tmp" if boxed else folder) if folder else "/nowhere"
    environment = {"PATH": "/usr/bin:/bin", "LANG": "C.UTF-8", "HOME": "/", "TMPDIR": place}
    if boxed:
        os.execve(plan["bwrap"], _bubblewrap(plan, folder, environment), {})
    os.chdir("/")
    _landlock(plan, folder)
    _install(bytes.fromhex(plan["seccomp"]))
    os.execve(plan["argv"][0], plan["argv"], environment)


def _descriptors(plan, boxed):
    """Leaves open: requests (0), nothing (1, 2), replies (3), for bubblewrap the filter (4), and until exec `report`."""
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


def _high(fd):
    return fcntl.fcntl(fd, fcntl.F_DUPFD_CLOEXEC, 100)


def _bubblewrap(plan, folder, environment):
    flags = ["--unshare-all", "--unshare-user", "--disable-userns", "--cap-drop", "ALL", "--new-session"]
    flags += ["--die-with-parent", "--as-pid-1", "--clearenv", "--hostname", "sandbox", "--proc", "/proc"]
    flags += ["--dev", "/dev", "--remount-ro", "/dev", "--seccomp", "4"]
    for path in plan["read"]:
        if os.path.islink(path):
            flags += ["--symlink", os.readlink(path), path]
        elif os.path.exists(path):
            flags += ["--ro-bind", path, path]
    for path in plan["masked"]:
        if os.path.isdir(path):
            flags += ["--tmpfs", path, "--remount-ro", path]
    if folder:
        flags += ["--bind", folder, "/tmp"]
    flags += ["--remount-ro", "/", "--chdir", "/"]
    for name, value in environment.items():
        flags += ["--setenv", name, value]
    return ["bwrap", *flags, "--", *plan["argv"]]


# Landlock, include/uapi/linux/landlock.h
_EXECUTE, _READ_FILE, _READ_DIR, _WRITE_FILE = 1 << 0, 1 << 2, 1 << 3, 1 << 1
_TRUNCATE, _IOCTL_DEV = 1 << 14, 1 << 15
_BY_ABI = ((1, (1 << 13) - 1), (2, 1 << 13), (3, _TRUNCATE), (5, _IOCTL_DEV))


def _landlock(plan, folder):
    """All file access is handled, so what no rule allows is refused; so are TCP, signals and abstract sockets that
    lead out, where the kernel knows of them."""
    abi = _LIBC.syscall(444, None, 0, 1)
    if abi < 1:
        raise OSError("no Landlock in this kernel")
    handled = sum(bits for since, bits in _BY_ABI if abi >= since)
    attributes = struct.pack("QQQ", handled, 3 if abi >= 4 else 0, 3 if abi >= 6 else 0)
    attributes = attributes[: 8 if abi < 4 else 16 if abi < 6 else 24]
    ruleset = _check(_LIBC.syscall(444, attributes, ctypes.c_size_t(len(attributes)), 0))
    reading = _EXECUTE | _READ_FILE | _READ_DIR
    for path in plan["read"]:
        _allow_reading(ruleset, path, plan["masked"], reading)
    for path in ("/dev/null", "/dev/zero", "/dev/urandom", "/dev/random"):
        _allow(ruleset, path, (_READ_FILE | _WRITE_FILE) if path == "/dev/null" else _READ_FILE)
    if folder:
        _allow(ruleset, folder, handled & ~_EXECUTE & ~_IOCTL_DEV)
    _check(_LIBC.syscall(446, ruleset, 0))
    os.close(ruleset)


def _allow_reading(ruleset, path, masked, access):
    """Rules hold for all that is beneath, so folders above a masked one are allowed entry by entry."""
    if path in masked or not os.path.exists(path):
        return
    if any(_inside(mask, path) for mask in masked):
        _allow(ruleset, path, _READ_DIR)
        for entry in os.listdir(path):
            _allow_reading(ruleset, os.path.join(path, entry), masked, access)
    else:
        _allow(ruleset, path, access if os.path.isdir(path) else access & ~_READ_DIR)


def _allow(ruleset, path, access):
    fd = os.open(path, os.O_PATH)
    _check(_LIBC.syscall(445, ruleset, 1, struct.pack("=Qi", access, fd), 0))
    os.close(fd)


def _install(program):
    class Program(ctypes.Structure):
        _fields_ = [("length", ctypes.c_ushort), ("filter", ctypes.c_char_p)]

    _prctl(_SECCOMP, 2, ctypes.byref(Program(len(program) // 8, program)))


# ---- keeping


def _watch(plan, child):
    """Why it is over, and the program's wait status if it ended by itself."""
    parent = os.getppid()
    poll = select.poll()
    ended = os.pidfd_open(child)
    poll.register(ended, select.POLLIN)
    poll.register(plan["lifeline"], select.POLLIN | select.POLLHUP)
    while True:
        ready = {fd for fd, _ in poll.poll(_WATCH_SECONDS * 1000)}
        if ended in ready:
            _, status = os.waitpid(child, 0)
            return "ended", os.waitstatus_to_exitcode(status)
        if plan["lifeline"] in ready or os.getppid() != parent:
            return "closed", None
        if _resident(child) > plan["memory_bytes"]:
            return "memory", None
        for orphan in set(_children()) - {child}:
            os.waitpid(orphan, os.WNOHANG)


def _resident(top):
    """Bytes of the processes from `top` on, each with what it shares."""
    return sum(_field(pid, "statm", 1) for pid in _tree(top)) * resource.getpagesize()


def _running_cpu(top):
    """Seconds of the processes from `top` on, and of their children that have ended. Killed ones leave no such sum."""
    ticks = sum(sum(_field(pid, "stat", place) for place in (13, 14, 15, 16)) for pid in _tree(top))
    return ticks / os.sysconf("SC_CLK_TCK")


def _tree(top):
    waiting = [top]
    while waiting:
        pid = waiting.pop()
        yield pid
        try:
            for task in os.listdir(f"/proc/{pid}/task"):
                with open(f"/proc/{pid}/task/{task}/children") as file:
                    waiting += map(int, file.read().split())
        except OSError:
            continue  # it is gone


def _field(pid, name, place):
    try:
        with open(f"/proc/{pid}/{name}", "rb") as file:
            text = file.read()
        # A program's name may hold spaces and brackets: what comes after its last bracket counts from the third field.
        fields = text.rpartition(b")")[2].split() if name == "stat" else text.split()
        return int(fields[place - 2 if name == "stat" else place])
    except (OSError, IndexError, ValueError):
        return 0


def _kill_all(uid, child):
    """Orphans become children of this process, so that none is left when none is left here."""
    while True:
        _kill_by_uid(uid)
        for pid in _children():
            try:
                os.kill(pid, signal.SIGKILL)
            except ProcessLookupError:
                continue
        try:
            os.waitpid(-1, 0)
        except ChildProcessError:
            return


def _children():
    with open(f"/proc/self/task/{os.getpid()}/children") as file:
        return list(map(int, file.read().split()))


def _kill_by_uid(uid):
    """All processes of the sandbox's own user at once, which no fork outruns."""
    if uid is None:
        return
    helper = os.fork()
    if helper == 0:
        try:
            os.setgroups([])
            os.setresgid(uid, uid, uid)
            os.setresuid(uid, uid, uid)
            if os.getuid() == uid != 0:
                os.kill(-1, signal.SIGKILL)
        finally:
            os._exit(0)
    os.waitpid(helper, 0)


def _mount(source, target, kind, flags, options):
    values = [None if value is None else value.encode() for value in (source, target, kind, options)]
    _check(_LIBC.mount(values[0], values[1], values[2], flags, values[3]), target)


def _prctl(option, *values):
    _check(_LIBC.prctl(option, *values, *([0] * (4 - len(values)))))


def _check(result, what="the kernel"):
    if result < 0:
        number = ctypes.get_errno()
        raise OSError(number, f"{what}: {os.strerror(number)}")
    return result


if __name__ == "__main__":
    given = json.loads(sys.argv[1])
    try:
        _kill_by_uid(given["uid"]) if "sweep" in given else main(given)
    except BaseException as failure:
        os.write(given["report"], json.dumps({"failed": f"{type(failure).__name__}: {failure}"}).encode())
