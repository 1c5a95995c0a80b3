"""Builds the sandbox around a program, watches it and ends it. A program of its own, with the standard library only.

It stays outside as the sandbox's keeper: it ends everything inside when the pipe `lifeline` closes (its parent closed
it, or is dead), when the memory of all processes together exceeds the plan's, or when the program ends; whatever the
program forked, and however it detached itself, is killed and reaped before the keeper ends. Last it writes to `report`
how the program ended and the CPU seconds of all that ran.
"""

from __future__ import annotations

import json
import os
import resource
import select
import signal
import sys
from collections.abc import Iterator

from finery_gpu_workers.sandbox import kernel
from finery_gpu_workers.sandbox.confine import become
from finery_gpu_workers.sandbox.mounts import prepare
from finery_gpu_workers.sandbox.plan import Plan

_WATCH_SECONDS = 0.1


def main() -> None:
    """The argument: a plan, or `{"sweep": uid}` to kill what an ended keeper has left."""
    given = json.loads(sys.argv[1])
    if "sweep" in given:
        kill_by_uid(given["sweep"])
        return
    try:
        run(given)
    except BaseException as failure:
        os.write(given["report"], json.dumps({"failed": f"{type(failure).__name__}: {failure}"}).encode())


def run(plan: Plan) -> None:
    kernel.prctl(kernel.SUBREAPER, 1)
    folder = prepare(plan)
    start, go = os.pipe()
    child = os.fork()
    if child == 0:
        try:
            os.close(go)
            become(plan, folder, start)
        except BaseException as error:
            os.write(plan["report"], json.dumps({"failed": f"{type(error).__name__}: {error}"}).encode())
        os._exit(126)
    os.close(start)
    for fd in (0, plan["result"]):
        os.close(fd)
    os.write(go, b"1")
    why, status = _watch(plan, child)
    used = resource.getrusage(resource.RUSAGE_CHILDREN)
    cpu = used.ru_utime + used.ru_stime + _running_cpu()
    _kill_all(plan["uid"])
    os.write(plan["report"], json.dumps({"why": why, "status": status, "cpu": cpu}).encode())


def _watch(plan: Plan, child: int) -> tuple[str, int | None]:
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
        if _resident() > plan["memory_bytes"] and _held() > plan["memory_bytes"]:
            return "memory", None
        for orphan in set(_children()) - {child}:
            os.waitpid(orphan, os.WNOHANG)


def _resident() -> int:
    """Bytes of all processes in the sandbox, each with what it shares."""
    return sum(_field(pid, "statm", 1) for pid in _inside()) * resource.getpagesize()


def _held() -> int:
    """Bytes of all processes in the sandbox, what they share counted once; slower to find."""
    return sum(_proportional(pid) for pid in _inside())


def _proportional(pid: int) -> int:
    try:
        with open(f"/proc/{pid}/smaps_rollup", "rb") as file:
            return 1024 * int(next(line for line in file if line.startswith(b"Pss:")).split()[1])
    except (OSError, StopIteration):
        return _field(pid, "statm", 1) * resource.getpagesize()


def _running_cpu() -> float:
    """Seconds of all processes in the sandbox, and of their children that have ended. Killed ones leave no such sum."""
    ticks = sum(sum(_field(pid, "stat", place) for place in (13, 14, 15, 16)) for pid in _inside())
    return ticks / os.sysconf("SC_CLK_TCK")


def _inside() -> Iterator[int]:
    """The program and what comes from it; what detached itself is a child of this process."""
    waiting = _children()
    while waiting:
        pid = waiting.pop()
        yield pid
        try:
            for task in os.listdir(f"/proc/{pid}/task"):
                with open(f"/proc/{pid}/task/{task}/children") as file:
                    waiting += map(int, file.read().split())
        except OSError:
            continue  # it is gone


def _field(pid: int, name: str, place: int) -> int:
    try:
        with open(f"/proc/{pid}/{name}", "rb") as file:
            text = file.read()
        # A program's name may hold spaces and brackets: what comes after its last bracket counts from the third field.
        fields = text.rpartition(b")")[2].split() if name == "stat" else text.split()
        return int(fields[place - 2 if name == "stat" else place])
    except (OSError, IndexError, ValueError):
        return 0


def _kill_all(uid: int | None) -> None:
    """Orphans become children of this process, so that none is left when none is left here."""
    while True:
        kill_by_uid(uid)
        for pid in _children():
            try:
                os.kill(pid, signal.SIGKILL)
            except ProcessLookupError:
                continue
        try:
            os.waitpid(-1, 0)
        except ChildProcessError:
            return


def _children() -> list[int]:
    with open(f"/proc/self/task/{os.getpid()}/children") as file:
        return list(map(int, file.read().split()))


def kill_by_uid(uid: int | None) -> None:
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
