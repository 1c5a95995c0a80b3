"""Checkpoint files on their way to disk: partial files, locks, what is there already, atomic rename. Sends nothing.

The partial is `.<name>.<sha12>.part` next to the target: its name depends on the content alone, so that a later run
finds it and asks for the missing bytes only. The lock is on the partial itself and dies with its process: two
processes never write the same partial, and nothing is left to tidy up.

A small file is one span, and its partial is what has come so far. A big one is fetched in several spans at once; behind
its content the partial then holds one number per span, the bytes that are there (8 bytes, little-endian), each written
after the bytes themselves, so that a kill loses nothing that was counted. They are cut off when the file is whole.
"""

from __future__ import annotations

import contextlib
import hashlib
import io
import json
import os
import sys
import threading
from collections.abc import Callable
from pathlib import Path, PurePosixPath
from typing import Literal

from finery._span import Span, Spoilt
from finery.errors import DownloadError
from finery.types.checkpoints import Checkpoint, CheckpointFile

if sys.platform != "win32":
    import fcntl

SPAN_BYTES = 32 << 20
"""Bytes of one span of a big file, which is one of two spans or more."""
_COUNT = 8  # bytes of a span's number


class Meter:
    """Adds up the bytes of all files of a download, from any thread; and says whether it is to stop."""

    def __init__(self, total: int, on_progress: Callable[[int, int], None] | None) -> None:
        self.stopped = False
        self._total = total
        self._done = 0
        self._on_progress = on_progress
        self._lock = threading.Lock()

    def add(self, count: int) -> None:
        with self._lock:
            self._done += count
            if self._on_progress is not None:
                self._on_progress(self._done, self._total)


def partials(checkpoint: Checkpoint, folder: Path, meter: Meter) -> list[Partial]:
    """All files of the checkpoint, every path checked before anything touches the disk."""
    seen: set[str] = set()
    for file in checkpoint.files:
        _check_path(file.path)
        if file.path in seen:
            raise DownloadError(f"Checkpoint {checkpoint.id} lists {file.path!r} twice; nothing was downloaded.")
        seen.add(file.path)
    _check_folder(checkpoint, folder)
    return [Partial(folder, file, meter) for file in checkpoint.files]


def _check_path(path: str) -> None:
    parts = path.split("/")
    bad = any(part in ("", ".", "..") for part in parts) or any(c in "\\:\x7f" or ord(c) < 32 for c in path)
    if bad or PurePosixPath(path).is_absolute():
        raise DownloadError(f"Refused the file name {path!r}: expected a relative path that stays inside the folder.")


def _check_folder(checkpoint: Checkpoint, folder: Path) -> None:
    """Files of two checkpoints in one folder would load as a model that neither of them is."""
    try:
        found = json.loads((folder / "manifest.json").read_bytes())
        other = found["job"], found["step"]
    except (OSError, ValueError, LookupError, TypeError):
        return
    if other != (checkpoint.job, checkpoint.step):
        raise DownloadError(
            f"{folder} holds another checkpoint, step {other[1]} of {other[0]}; expected none, or {checkpoint.id}, "
            f"step {checkpoint.step} of {checkpoint.job}. Choose another folder, or remove that one."
        )


class Partial:
    """`acquire` until True, `resume`, then until `settle` is True fill the spans that `start` gives, in any order."""

    def __init__(self, folder: Path, file: CheckpointFile, meter: Meter) -> None:
        self.file = file
        self.target = folder / file.path
        self.meter = meter
        self.resumed = False
        """Some of it was there before this run."""
        self.spoilt: Literal["ranges", "stale"] | None = None
        """To be fetched anew: the server sends whole files only, or what was there is not what it has."""
        self._folder = folder
        self._partial = self.target.with_name(f".{self.target.name[:200]}.{file.sha256[:12]}.part")
        self._open: io.FileIO | None = None
        self._spans: list[Span] = []
        self._running = 0
        self._lock = threading.Lock()

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
        """Find what is there: the file itself, or the part of it that an earlier run left."""
        if self._placed():
            self._partial.unlink()
            self._release()
            self.meter.add(self.file.bytes)
            return None
        handle = self._handle()
        size = os.fstat(handle.fileno()).st_size
        spans = self._cut(many=True)
        if len(spans) > 1 and size == self.file.bytes + _COUNT * len(spans):
            handle.seek(self.file.bytes)
            counts = handle.read(_COUNT * len(spans))
            for n, span in enumerate(spans):
                span.done = min(span.size, int.from_bytes(counts[_COUNT * n : _COUNT * (n + 1)], "little"))
        elif size <= self.file.bytes:
            for span in spans:
                span.done = min(span.size, max(0, size - span.start))
        else:
            return self._restart()
        self.resumed = any(span.done for span in spans)
        self._take(spans)
        return None

    def start(self) -> list[Span]:
        """The spans that lack bytes, to be filled now."""
        missing = [span for span in self._spans if span.done < span.size]
        self._running = len(missing)
        return missing

    def finished(self) -> bool:
        """After a span of several was left: True for the last of them."""
        with self._lock:
            self._running -= 1
            return self._running == 0

    def settle(self) -> bool:
        """True once the whole file, its hash proved, is in its place. Reads it once: not for an event loop."""
        if self._open is None:
            return True
        if self.spoilt is not None:
            self._restart(many=self.spoilt != "ranges")
            return False
        if any(span.done < span.size for span in self._spans):
            return False
        self._open.truncate(self.file.bytes)
        self._open.seek(0)
        digest = hashlib.file_digest(self._open, "sha256").hexdigest()
        if digest == self.file.sha256:
            os.fsync(self._open.fileno())
            if sys.platform == "win32":
                self._release()
            self._partial.replace(self.target)
            self._release()
            return True
        if not self.resumed:
            self.discard(f"its sha256 is {digest}, expected {self.file.sha256}")
        self._restart()
        return False

    def write(self, span: Span, chunk: bytes) -> None:
        """The next bytes of a span; raises `Spoilt` where they are of no use any more."""
        with self._lock:
            if self.spoilt is not None or self.meter.stopped:
                raise Spoilt
            self._put(span.offset, chunk)
            span.done += len(chunk)
            if len(self._spans) > 1:
                self._count(span)
        self.meter.add(len(chunk))

    def rewind(self, span: Span) -> None:
        """The only span from its start again: the server sends the whole file."""
        self._handle().truncate(0)
        self.meter.add(-span.done)
        span.done = 0
        self.resumed = False

    def discard(self, why: str) -> None:
        self._partial.unlink(missing_ok=True)
        raise DownloadError(f"{self.file.path} was discarded: {why}. Download it again.")

    def close(self) -> None:
        """Give up the lock; what has arrived stays for the next run."""
        if self._open is not None and not any(span.done for span in self._spans) and self._still_ours(self._open):
            self._partial.unlink(missing_ok=True)
        self._release()

    def _cut(self, *, many: bool) -> list[Span]:
        size = self.file.bytes
        if not many or size < 2 * SPAN_BYTES:
            return [Span(self, 0, 0, size, only=True)]
        starts = range(0, size, SPAN_BYTES)
        return [Span(self, n, at, min(at + SPAN_BYTES, size), only=False) for n, at in enumerate(starts)]

    def _take(self, spans: list[Span]) -> None:
        self._spans = spans
        if len(spans) > 1:
            self._handle().truncate(self.file.bytes + _COUNT * len(spans))
            for span in spans:
                self._count(span)
        self.meter.add(sum(span.done for span in spans))

    def _restart(self, *, many: bool = True) -> None:
        self.meter.add(-sum(span.done for span in self._spans))
        self._handle().truncate(0)
        self.spoilt, self.resumed = None, False
        self._take(self._cut(many=many))

    def _count(self, span: Span) -> None:
        self._put(self.file.bytes + _COUNT * span.index, span.done.to_bytes(_COUNT, "little"))

    def _put(self, at: int, content: bytes) -> None:
        handle = self._handle()
        handle.seek(at)
        view = memoryview(content)
        while view:
            view = view[handle.write(view) :]

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
