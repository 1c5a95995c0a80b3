"""A file for upload, and the one multipart body we send. Read from disk as it goes out, and again on a retry."""

from __future__ import annotations

import io
import os
import shutil
import tempfile
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import dataclass, field
from pathlib import Path
from typing import BinaryIO

from finery.errors import FineryError

Source = str | os.PathLike[str] | bytes | BinaryIO
_CHUNK = 1 << 20


@dataclass(frozen=True)
class Upload:
    name: str
    size: int
    open: Callable[[], AbstractContextManager[BinaryIO]] = field(repr=False)
    """A fresh reader at the first byte, as often as needed."""


@contextmanager
def open_upload(source: Source, name: str | None) -> Iterator[Upload]:
    """Anything a customer may hand in, as an `Upload`. What cannot seek is spooled to a temporary file."""
    if isinstance(source, bytes):
        content = source
        yield _named(name or "upload.jsonl", len(content), lambda: nullcontext(io.BytesIO(content)))
    elif isinstance(source, (str, os.PathLike)):
        path = Path(source)
        yield _named(name or path.name, path.stat().st_size, lambda: path.open("rb"))
    elif hasattr(source, "read"):
        with _seekable(source) as file:
            start = file.tell()
            size = file.seek(0, os.SEEK_END) - start
            file.seek(start)
            given = getattr(source, "name", None)
            default = Path(given).name if isinstance(given, str) else "upload.jsonl"
            yield _named(name or default, size, lambda: _from(file, start))
    else:
        raise TypeError(f"expected a path, bytes or a file opened in binary mode, found {type(source).__name__}")


def _named(name: str, size: int, open_: Callable[[], AbstractContextManager[BinaryIO]]) -> Upload:
    try:
        name.encode("utf-8")
    except UnicodeEncodeError:
        raise ValueError(f"the file name {name!r} is not Unicode text; pass name=…") from None
    return Upload(name, size, open_)


@contextmanager
def _from(file: BinaryIO, start: int) -> Iterator[BinaryIO]:
    file.seek(start)
    yield file


@contextmanager
def _seekable(file: BinaryIO) -> Iterator[BinaryIO]:
    if isinstance(file.read(0), str):
        raise TypeError('the file is open in text mode; open it with "rb"')
    if file.seekable():
        yield file
        return
    with tempfile.TemporaryFile() as copy:
        shutil.copyfileobj(file, copy, _CHUNK)
        copy.seek(0)
        yield copy


@dataclass(frozen=True)
class Multipart:
    """`name` (and `project`) as text fields, then `file`. A text field carries any name unchanged; a header cannot."""

    upload: Upload
    boundary: str
    project: str | None = None

    @property
    def content_type(self) -> str:
        return f"multipart/form-data; boundary={self.boundary}"

    @property
    def length(self) -> int:
        return len(self._head) + self.upload.size + len(self._tail)

    def file_bytes(self, sent: int) -> int:
        """How many of the file's own bytes are among the first `sent` bytes of the body."""
        return min(max(0, sent - len(self._head)), self.upload.size)

    def chunks(self) -> Iterator[bytes]:
        yield self._head
        sent = 0
        with self.upload.open() as file:
            while chunk := file.read(_CHUNK):
                sent += len(chunk)
                if sent > self.upload.size:
                    break
                yield chunk
        if sent != self.upload.size:
            raise FineryError(f"The file {self.upload.name!r} changed while it was sent; upload it again.")
        yield self._tail

    @property
    def _head(self) -> bytes:
        # Escaped as browsers do (WHATWG HTML, multipart/form-data), so that no name can end the header.
        quoted = self.upload.name.replace("\r", "%0D").replace("\n", "%0A").replace('"', "%22").replace("\0", "%00")
        fields = {"name": self.upload.name} | ({} if self.project is None else {"project": self.project})
        texts = "".join(
            f'--{self.boundary}\r\nContent-Disposition: form-data; name="{name}"\r\n\r\n{text}\r\n'
            for name, text in fields.items()
        )
        return (
            f"{texts}--{self.boundary}\r\n"
            f'Content-Disposition: form-data; name="file"; filename="{quoted}"\r\n'
            "Content-Type: application/octet-stream\r\n\r\n"
        ).encode()

    @property
    def _tail(self) -> bytes:
        return f"\r\n--{self.boundary}--\r\n".encode()
