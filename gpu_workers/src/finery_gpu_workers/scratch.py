"""Scratch space that a killed worker does not leave behind for ever: the next one on the machine removes it."""

from __future__ import annotations

import fcntl
import os
import shutil
import stat
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path


@contextmanager
def scratch_folder() -> Iterator[Path]:
    """A new folder, held by a lock that ends with this process. Removes the folders that nobody holds any more."""
    root = _root()
    with _open(root) as root_fd:
        fcntl.flock(root_fd, fcntl.LOCK_EX)  # nobody sweeps between the making of a folder and its lock
        _sweep(root)
        folder = Path(tempfile.mkdtemp(dir=root))
        held = os.open(folder, os.O_RDONLY)
        fcntl.flock(held, fcntl.LOCK_EX)
    try:
        yield folder
    finally:
        shutil.rmtree(folder, ignore_errors=True)
        os.close(held)


def _root() -> Path:
    """One for all workers of this user; others may neither read it nor have made it."""
    root = Path(tempfile.gettempdir()) / f"finery-workers-{os.getuid()}"
    root.mkdir(mode=0o700, exist_ok=True)
    found = root.lstat()
    if not stat.S_ISDIR(found.st_mode) or found.st_uid != os.getuid() or found.st_mode & 0o077:
        raise PermissionError(f"{root}: expected a folder of this user alone; remove it or set TMPDIR")
    return root


def _sweep(root: Path) -> None:
    for folder in root.iterdir():
        try:
            with _open(folder) as fd:
                fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
                shutil.rmtree(folder, ignore_errors=True)
        except (BlockingIOError, FileNotFoundError):
            continue  # its worker lives, or has just removed it


@contextmanager
def _open(folder: Path) -> Iterator[int]:
    fd = os.open(folder, os.O_RDONLY)
    try:
        yield fd
    finally:
        os.close(fd)
