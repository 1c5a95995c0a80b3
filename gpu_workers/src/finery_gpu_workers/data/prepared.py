"""The prepared data set: token ids and masks in shards, and an index with the sha256 of every file.

A shard is a safetensors file: tokens int32 [T], mask uint8 [T] (1: the token is a target), offsets int64 [samples + 1],
lines int64 [samples] (of the uploaded file, from 1); of pairs also prompts int64 [samples] (tokens of the prompt that
both sides share; they are the samples 2n and 2n + 1). The sets are `train` and, with a validation file, `validation`.
A sample is a row, or one turn of a row that is trained turn by turn.
"""

from __future__ import annotations

import hashlib
import json
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray
from safetensors.numpy import save_file

from finery_gpu_workers.data.tokens import TokenRow
from finery_gpu_workers.errors import WorkerError

INDEX = "index.json"
SHARD_TOKENS = 4 * 1024 * 1024
_DTYPES = {"I32": np.int32, "I64": np.int64, "U8": np.uint8}


def sha256_file(path: Path) -> str:
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


@dataclass
class SetWriter:
    """Writes one set; holds at most one shard in memory."""

    folder: Path
    name: str
    samples: int = 0
    highest: int = -1
    """The highest token id so far."""
    pairs: bool = False
    """Rows are the sides of pairs, and shards hold the lengths of their prompts."""
    files: list[dict[str, Any]] = field(default_factory=list)
    _rows: list[TokenRow] = field(default_factory=list)
    _lines: list[int] = field(default_factory=list)
    _waiting: int = 0

    def add(self, row: TokenRow, line: int) -> None:
        self._rows.append(row)
        self._lines.append(line)
        self._waiting += len(row.tokens)
        self.samples += 1
        if self._waiting >= SHARD_TOKENS:
            self._flush()

    def close(self) -> dict[str, Any]:
        """What the index says of the set's files."""
        self._flush()
        digest = hashlib.sha256("".join(file["sha256"] for file in self.files).encode()).hexdigest()
        return {"samples": self.samples, "highest_token": self.highest, "files": self.files, "digest": digest}

    def _flush(self) -> None:
        if not self._rows:
            return
        path = self.folder / f"{self.name}-{len(self.files):05d}.safetensors"
        lengths = [len(row.tokens) for row in self._rows]
        tensors = {
            "tokens": np.concatenate([row.tokens for row in self._rows]),
            "mask": np.concatenate([row.mask for row in self._rows]),
            "offsets": np.cumsum([0, *lengths], dtype=np.int64),
            "lines": np.array(self._lines, dtype=np.int64),
        }
        if self.pairs:
            tensors["prompts"] = np.array([row.prompt for row in self._rows], dtype=np.int64)
        self.highest = max(self.highest, int(tensors["tokens"].max()))
        save_file(tensors, path)
        self.files.append({"path": path.name, "bytes": path.stat().st_size, "sha256": sha256_file(path)})
        self._rows, self._lines, self._waiting = [], [], 0


@dataclass(frozen=True)
class PreparedSet:
    """One set; its shards are mapped from disk, so that they take no memory that is needed elsewhere."""

    shards: tuple[dict[str, NDArray[Any]], ...]
    lengths: NDArray[np.int64]
    """[samples]"""
    trained: NDArray[np.int64]
    """[samples], targets of each"""
    starts: NDArray[np.int64]
    """[shards + 1], first sample of each shard"""
    prompts: NDArray[np.int64] | None = None
    """[samples], of pairs: tokens of the prompt of each side"""

    def __len__(self) -> int:
        return len(self.lengths)

    def row(self, n: int) -> TokenRow:
        shard = int(np.searchsorted(self.starts, n, side="right")) - 1
        arrays = self.shards[shard]
        start, end = arrays["offsets"][n - self.starts[shard] :][:2]
        prompt = 0 if self.prompts is None else int(self.prompts[n])
        return TokenRow(arrays["tokens"][start:end], arrays["mask"][start:end], prompt=prompt)


@dataclass(frozen=True)
class Prepared:
    index: dict[str, Any]
    train: PreparedSet
    validation: PreparedSet | None
    folder: Path


def load(folder: Path) -> Prepared:
    """Reads a folder that holds the index and its files; every file must have the sha256 that the index says."""
    index: dict[str, Any] = json.loads((folder / INDEX).read_text())
    sets = {name: _load_set(folder, entry) for name, entry in index["sets"].items()}
    return Prepared(index, sets["train"], sets.get("validation"), folder)


def files_of(entry: dict[str, Any]) -> list[dict[str, Any]]:
    """All files of a set in the index, with path, bytes, sha256: its shards, and the items of prompts."""
    return [*entry["files"], *([entry["items"]] if "items" in entry else [])]


def _load_set(folder: Path, entry: dict[str, Any]) -> PreparedSet:
    for file in files_of(entry):
        found = sha256_file(folder / file["path"])
        if found != file["sha256"]:
            message = f"{file['path']}: expected sha256 {file['sha256']}, found {found}"
            raise WorkerError("prepared_data_changed", message)
    shards = [_mapped(folder / file["path"]) for file in entry["files"]]
    lengths = [np.diff(shard["offsets"]) for shard in shards]
    trained = [np.add.reduceat(shard["mask"], shard["offsets"][:-1], dtype=np.int64) for shard in shards]
    return PreparedSet(
        shards=tuple(shards),
        lengths=np.concatenate(lengths),
        trained=np.concatenate(trained),
        starts=np.cumsum([0, *map(len, lengths)]),
        prompts=np.concatenate([s["prompts"] for s in shards]) if "prompts" in shards[0] else None,
    )


def _mapped(path: Path) -> dict[str, NDArray[Any]]:
    """The tensors of a safetensors file (https://github.com/huggingface/safetensors#format), one-dimensional."""
    with path.open("rb") as file:
        size = int.from_bytes(file.read(8), "little")
        header = json.loads(file.read(size))
    header.pop("__metadata__", None)
    content = np.memmap(path, np.uint8, "r")[8 + size :].view(np.ndarray)  # slices of a memmap are slow
    return {name: content[slice(*info["data_offsets"])].view(_DTYPES[info["dtype"]]) for name, info in header.items()}
