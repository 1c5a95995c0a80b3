"""The object store, through obstore: `file:///path` or `s3://bucket/prefix`."""

from __future__ import annotations

import hashlib
from collections.abc import Iterable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path, PurePosixPath
from urllib.parse import unquote, urlparse

import obstore
from obstore.store import LocalStore, ObjectStore, from_url

from finery_gpu_workers.data.prepared import sha256_file

_CHUNK_BYTES = 8 * 1024 * 1024
_CONNECTIONS = 4


class DigestError(Exception):
    """An object does not have the content that it should have."""


@dataclass(frozen=True)
class StoredFile:
    path: str
    """Relative to its prefix, with forward slashes."""
    bytes: int
    sha256: str


def open_store(url: str) -> ObjectStore:
    parts = urlparse(url)
    if parts.scheme == "file":
        return LocalStore(prefix=unquote(parts.path), mkdir=True)
    return from_url(url)


def read(store: ObjectStore, key: str) -> bytes:
    return bytes(obstore.get(store, key).bytes())


def download(store: ObjectStore, key: str, path: Path, sha256: str | None = None) -> None:
    """One object into a file, streamed. Raises DigestError when its sha256 (hex) is not the given one."""
    digest = hashlib.sha256()
    path.parent.mkdir(parents=True, exist_ok=True)
    with path.open("wb") as file:
        for chunk in obstore.get(store, key).stream(min_chunk_size=_CHUNK_BYTES):
            digest.update(chunk)
            file.write(chunk)
    if sha256 is not None and digest.hexdigest() != sha256:
        raise DigestError(f"expected sha256 {sha256}, found {digest.hexdigest()} in an object of the store")


def download_all(store: ObjectStore, prefix: str, files: Iterable[tuple[str, str | None]], folder: Path) -> None:
    """Files (path, sha256) under a prefix into a folder, a few at a time."""
    with ThreadPoolExecutor(_CONNECTIONS) as pool:
        jobs = [pool.submit(download, store, prefix + path, folder / _inside(path), sha256) for path, sha256 in files]
        for job in jobs:
            job.result()


def upload_all(store: ObjectStore, folder: Path, prefix: str) -> list[StoredFile]:
    """Every file of a folder under a prefix, hashed first; sorted by path."""
    paths = sorted(path for path in folder.rglob("*") if path.is_file())
    with ThreadPoolExecutor(_CONNECTIONS) as pool:
        return list(pool.map(lambda path: _upload(store, path, path.relative_to(folder).as_posix(), prefix), paths))


def upload_text(store: ObjectStore, text: str, prefix: str, name: str) -> StoredFile:
    content = text.encode()
    obstore.put(store, prefix + name, content)
    return StoredFile(name, len(content), hashlib.sha256(content).hexdigest())


def _upload(store: ObjectStore, path: Path, name: str, prefix: str) -> StoredFile:
    stored = StoredFile(name, path.stat().st_size, sha256_file(path))
    obstore.put(store, prefix + name, path)
    return stored


def _inside(path: str) -> str:
    parts = PurePosixPath(path)
    if parts.is_absolute() or ".." in parts.parts:
        raise ValueError(f"expected a relative path without '..', found {path!r}")
    return path
