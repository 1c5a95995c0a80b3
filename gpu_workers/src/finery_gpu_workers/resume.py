"""The resume bundle: what an attempt needs to go on as if the run had never stopped.

Learner state and random number generators are stored as tensors; cursor and what else is known lie in an index that
names the sha256 of every file. No pickle.
"""

from __future__ import annotations

import hashlib
import json
import shutil
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file, save_file

from finery_gpu_workers import storage
from finery_gpu_workers.errors import WorkerError
from finery_gpu_workers.learner import Learner
from finery_gpu_workers.stopping import Patience
from finery_gpu_workers.storage import DigestError
from finery_gpu_workers.work import Work

_INDEX = "index.json"
_VERSION = 2


@dataclass(frozen=True)
class Cursor:
    """How far a run is in its data."""

    step: int = 0
    epoch: int = 0
    position: int = 0
    """Rows of the epoch that are done."""
    rows: int = 0
    """Over all steps."""
    trained_tokens: int = 0


@dataclass(frozen=True)
class Known:
    """What a run knows besides weights and cursor."""

    metrics: dict[str, Any] | None = None
    """Of the last step."""
    evaluation: dict[str, Any] | None = None
    """The last one."""
    patience: Patience = field(default_factory=Patience)
    untouched: tuple[str, ...] = ()
    """Trained parameters whose gradient was zero in every step so far."""
    extra: dict[str, Any] = field(default_factory=dict)
    """The method's own, as JSON."""


@dataclass(frozen=True)
class Bundle:
    """The index of a bundle."""

    cursor: Cursor
    known: Known
    compute: dict[str, Any]
    """As in the manifest."""
    files: list[dict[str, Any]]

    @property
    def dtype(self) -> torch.dtype:
        dtype: torch.dtype = getattr(torch, self.compute["dtype"])
        return dtype


@dataclass(frozen=True)
class Snapshot:
    """A bundle in memory: a copy of all that training goes on to change."""

    cursor: Cursor
    known: Known
    compute: dict[str, Any]
    state: dict[str, torch.Tensor]
    generators: dict[str, torch.Tensor]


def snapshot(learner: Learner, cursor: Cursor, known: Known, compute: dict[str, Any]) -> Snapshot:
    return Snapshot(cursor, known, compute, learner.state(), _generators())


def upload(work: Work, taken: Snapshot, folder: Path, prefix: str) -> str:
    """Stores the bundle under `prefix`; the sha256 of its index. `folder` is scratch space."""
    folder.mkdir()
    save_file(taken.state, folder / "learner.safetensors")
    save_file(taken.generators, folder / "generators.safetensors")
    files = [asdict(file) for file in storage.upload_all(work.store, folder, prefix)]
    index = {
        "version": _VERSION,
        "cursor": asdict(taken.cursor),
        "known": asdict(taken.known),
        "compute": taken.compute,
        "files": files,
    }
    return storage.upload_text(work.store, json.dumps(index), prefix, _INDEX).sha256


def open_bundle(work: Work, base_sha256: str) -> Bundle | None:
    """Where the assignment goes on from. Raises DigestError, WorkerError `model_changed`."""
    if not work.assignment.HasField("resume"):
        return None
    raw = storage.read(work.store, work.assignment.resume.prefix + _INDEX)
    if hashlib.sha256(raw).hexdigest() != work.assignment.resume.sha256:
        raise DigestError("the index of the resume bundle is not the one that was published")
    index = json.loads(raw)
    if index["version"] != _VERSION:
        raise WorkerError("other_resume_version", f"resume: expected version {_VERSION}, found {index['version']}")
    if (expected := index["compute"]["base_sha256"]) != base_sha256:
        message = f"base weights: expected {expected}, on which the run began, found {base_sha256}"
        raise WorkerError("model_changed", message)
    known = index["known"]
    known |= {"patience": Patience(**known["patience"]), "untouched": tuple(known["untouched"])}
    return Bundle(Cursor(**index["cursor"]), Known(**known), index["compute"], index["files"])


def restore(work: Work, bundle: Bundle, learner: Learner) -> None:
    """Puts learner and generators where the bundle was written. Raises DigestError."""
    prefix, folder = work.assignment.resume.prefix, work.folder / "resume"
    storage.download_all(work.store, prefix, [(f["path"], f["sha256"]) for f in bundle.files], folder)
    learner.load_state(load_file(folder / "learner.safetensors"))
    _set_generators(load_file(folder / "generators.safetensors"))
    shutil.rmtree(folder)


def _generators() -> dict[str, torch.Tensor]:
    states = {"cpu": torch.get_rng_state()}
    return states | {f"cuda.{n}": state for n, state in enumerate(_cuda_states())}


def _cuda_states() -> list[torch.Tensor]:
    return torch.cuda.get_rng_state_all() if torch.cuda.is_available() else []


def _set_generators(states: dict[str, torch.Tensor]) -> None:
    torch.set_rng_state(states["cpu"])
    for n in range(min(len(states) - 1, torch.cuda.device_count())):
        torch.cuda.set_rng_state(states[f"cuda.{n}"], n)
