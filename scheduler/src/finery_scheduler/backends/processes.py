"""Find and kill every process of an attempt on this machine."""

from __future__ import annotations

import os
import time
from contextlib import suppress

import psutil

from finery_scheduler.backends.worker import MARK


class StillRunningError(Exception):
    """Processes of an attempt outlived SIGKILL: their accelerator is not free."""


def of_attempt(attempt: str) -> list[psutil.Process]:
    """The marked processes, their descendants and the members of the groups they lead; not yet reaped ones excluded.

    The mark survives `setsid` and the death of a parent, the other two survive a cleared environment.
    """
    found: dict[int, psutil.Process] = {}
    others: dict[int, tuple[psutil.Process, int]] = {}
    for process in psutil.process_iter(["environ", "ppid", "status"]):
        if process.info["status"] == psutil.STATUS_ZOMBIE or process.pid == os.getpid():
            continue
        if (process.info["environ"] or {}).get(MARK) == attempt:
            found[process.pid] = process
        else:
            others[process.pid] = (process, process.info["ppid"])
    while found:
        related = [pid for pid, (_, parent) in others.items() if parent in found or _group(pid) in found]
        if not related:
            break
        found.update((pid, others.pop(pid)[0]) for pid in related)
    return list(found.values())


def _group(pid: int) -> int:
    with suppress(ProcessLookupError, PermissionError):
        return os.getpgid(pid)
    return -1


def kill_attempt(attempt: str, timeout: float = 10.0) -> None:
    """SIGKILL until nothing of the attempt runs here. Raises `StillRunningError` after `timeout` seconds."""
    deadline = time.monotonic() + timeout
    while running := of_attempt(attempt):
        for process in running:
            with suppress(psutil.NoSuchProcess):
                process.kill()
        if time.monotonic() > deadline:
            pids = [process.pid for process in running]
            raise StillRunningError(f"attempt {attempt}: processes {pids} still run {timeout:.0f} s after SIGKILL")
        time.sleep(0.02)
