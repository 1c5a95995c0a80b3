"""One checkpoint file on its way to disk: partial file, lock, running hash, atomic rename. Sends nothing.

The partial is `.<name>.<sha12>.part` next to the target: its name depends on the content alone, so that a later run
finds it and asks for the missing bytes only. The lock is on the partial itself and dies with its process: two
processes never write the same partial, and nothing is left to tidy up.
"""

from __future__ import annotations

import contextlib
import hashlib
import io
import os
import re
import sys
from collections.abc import Callable, Mapping
from pathlib import Path, PurePosixPath

from finery.errors import APIConnectionError, APIError, DownloadError
from finery.types.checkpoints import Checkpoint, CheckpointFile

if sys.platform != "win32":
    import fcntl

LOCK_POLL_SECONDS = 0.1
_READ = 1 << 20
_RANGE = re.compile(r"bytes (\d+)-\d+/(?:\d+|\*)")


class Meter:
    """Adds up the bytes of all files of a download."""

    def __init__(self, total: int, on_progress: Callable[[int, int], None] | None) -> None:
        self._total = total
        self._on_progress = on_progress
        self._done: dict[str, int] = {}

    def set(self, path: str, done: int) -> None:
        self._done[path] = done
        if self._on_progress is not None:
            self._on_progress(sum(self._done.values()), self._total)


def partials(checkpoint: Checkpoint, folder: Path, on_progress: Callable[[int, int], None] | None) -> list[Partial]:
    """All files of the checkpoint, every path checked before anything touches the disk."""
    seen: set[str] = set()
    for file in checkpoint.files:
        _check_path(file.path)
        if file.path in seen:
            raise DownloadError(f"Checkpoint {checkpoint.id} lists {file.path!r} twice; nothing was downloaded.")
        seen.add(file.path)
    meter = Meter(sum(file.bytes for file in checkpoint.files), on_progress)
    return [Partial(folder, file, meter) for file in checkpoint.files]


def _check_path(path: str) -> None:
    parts = path.split("/")
    bad = any(part in ("", ".", "..") for part in parts) or any(c in "\\:\x7f" or ord(c) < 32 for c in path)
    if bad or PurePosixPath(path).is_absolute():
        raise DownloadError(f"Refused the file name {path!r}: expected a relative path that stays inside the folder.")


class Partial:
    """`acquire` until True, `resume`, then until `settle` is True fetch from `offset`: `begin`, `write`…, `end`."""

    def __init__(self, folder: Path, file: CheckpointFile, meter: Meter) -> None:
        self.file = file
        self.offset = 0
        self.target = folder / file.path
        self._folder = folder
        self._meter = meter
        self._partial = self.target.with_name(f".{self.target.name[:200]}.{file.sha256[:12]}.part")
        self._open: io.FileIO | None = None
        self._digest = hashlib.sha256()
        self._resumed = False
        self._offset_before = 0
        self._failures = 0

    def acquire(self) -> bool:
        """True once the partial is ours; False while another process fetches the file."""
        self.target.parent.mkdir(parents=True, exist_ok=True)
        if not self.target.parent.resolve().is_relative_to(self._folder.resolve()):
            raise DownloadError(f"Refused {self.file.path!r}: a link in {self._folder} leads out of that folder.")
        flags = os.O_RDWR | os.O_CREAT | getattr(os, "O_NOFOLLOW", 0) | getattr(os, "O_BINARY", 0)
        handle = io.FileIO(os.open(self._partial, flags, 0o666), "r+")
        if not _lock(handle) or not self._still_ours(handle):
            handle.close()
            return False
        self._open = handle
        return True

    def resume(self) -> None:
        """Hash what is there, the file itself or the part that an earlier run left, and go on behind it."""
        if self._placed():
            self._partial.unlink()
            self._release()
            self._meter.set(self.file.path, self.file.bytes)
            return
        handle = self._handle()
        self._restart(keep=os.fstat(handle.fileno()).st_size <= self.file.bytes)
        while chunk := handle.read(_READ):
            self._digest.update(chunk)
            self.offset += len(chunk)
        self._resumed = self.offset > 0
        self._offset_before = self.offset
        self._meter.set(self.file.path, self.offset)

    def settle(self) -> bool:
        """True once the whole file, its hash proved, is in its place."""
        if self._open is None:
            return True
        if self.offset < self.file.bytes:
            return False
        if self._digest.hexdigest() == self.file.sha256:
            os.fsync(self._open.fileno())
            if sys.platform == "win32":
                self._release()
            self._partial.replace(self.target)
            self._release()
            return True
        if not self._resumed:
            self._discard(f"its sha256 is {self._digest.hexdigest()}, expected {self.file.sha256}")
        self._restart()
        return False

    def begin(self, status: int, headers: Mapping[str, str]) -> None:
        """Before the first byte of an answer: a server may send the rest (206) or all (200)."""
        self._offset_before = self.offset
        if status == 206:
            found = _RANGE.fullmatch(headers.get("content-range", ""))
            if found is None or int(found[1]) != self.offset:
                raise DownloadError(
                    f"{self.file.path}: expected bytes from {self.offset}, found {headers.get('content-range')!r}"
                )
        elif self.offset:
            self._restart()

    def write(self, chunk: bytes) -> None:
        if self.offset + len(chunk) > self.file.bytes:
            self._discard(f"the server sent more than its {self.file.bytes} bytes")
        view = memoryview(chunk)
        while view:
            view = view[self._handle().write(view) :]
        self._digest.update(chunk)
        self.offset += len(chunk)
        self._meter.set(self.file.path, self.offset)

    def end(self) -> None:
        """After the last byte of an answer."""
        if self.offset < self.file.bytes:
            message = f"{self.file.path}: the answer ended after {self.offset} of {self.file.bytes} bytes"
            raise APIConnectionError(message, code="connection_error")

    def failed(self, error: APIError) -> int:
        """How many fetches in a row have now brought nothing. 416 means that the partial is not the server's file."""
        if error.status == 416 and self._resumed:
            self._restart()
            return 0
        self._failures = 1 if self.offset > self._offset_before else self._failures + 1
        self._offset_before = self.offset
        return self._failures

    def close(self) -> None:
        """Give up the lock; what has arrived stays for the next run."""
        if self._open is not None and self.offset == 0:
            self._partial.unlink(missing_ok=True)
        self._release()

    def _still_ours(self, handle: io.FileIO) -> bool:
        """The holder before us may have renamed or removed what we waited for."""
        mine = os.fstat(handle.fileno())
        try:
            there = os.stat(self._partial, follow_symlinks=False)
        except FileNotFoundError:
            return False
        return (mine.st_dev, mine.st_ino) == (there.st_dev, there.st_ino)

    def _placed(self) -> bool:
        if not self.target.is_file() or self.target.stat().st_size != self.file.bytes:
            return False
        with self.target.open("rb") as file:
            return hashlib.file_digest(file, "sha256").hexdigest() == self.file.sha256

    def _restart(self, *, keep: bool = False) -> None:
        handle = self._handle()
        handle.seek(0)
        if not keep:
            handle.truncate()
        self._digest = hashlib.sha256()
        self.offset = 0
        self._resumed = False

    def _discard(self, why: str) -> None:
        self._partial.unlink(missing_ok=True)
        self._release()
        raise DownloadError(f"{self.file.path} was discarded: {why}. Download it again.")

    def _handle(self) -> io.FileIO:
        if self._open is None:
            raise DownloadError(f"{self.file.path} is not open for writing")
        return self._open

    def _release(self) -> None:
        if self._open is not None:
            self._open.close()
            self._open = None


def _lock(handle: io.FileIO) -> bool:
    """False while another process holds it. On Windows there is none; the hash still guards the result."""
    if sys.platform == "win32":
        return True
    with contextlib.suppress(BlockingIOError):
        fcntl.flock(handle, fcntl.LOCK_EX | fcntl.LOCK_NB)
        return True
    return False
