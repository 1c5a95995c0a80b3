"""Checkpoints: staged on disk, hashed, uploaded under the attempt's prefix, and only then published.

Two folders are stored for each: what the customer gets (the adapter in PEFT's layout, the base's tokenizer byte for
byte, the chat template that was trained with, generation settings, a model card, a manifest), and the resume bundle
(learner state and random number generators as tensors, the cursor in an index that names the sha256 of every file; no
pickle).
"""

from __future__ import annotations

import hashlib
import json
import platform
import shutil
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import torch
from safetensors import safe_open
from safetensors.torch import load_file, save_file

from finery_gpu_workers import storage
from finery_gpu_workers.data.chat import template_source
from finery_gpu_workers.errors import WorkerError
from finery_gpu_workers.learner import Learner
from finery_gpu_workers.storage import DigestError
from finery_gpu_workers.work import Work

ADAPTER = "adapter_model.safetensors"
MANIFEST = "manifest.json"
_INDEX = "index.json"
_TOKENIZER_FILES = (
    "tokenizer.json",
    "tokenizer_config.json",
    "special_tokens_map.json",
    "added_tokens.json",
    "vocab.json",
    "merges.txt",
    "tokenizer.model",
)


@dataclass(frozen=True)
class Cursor:
    """How far a run is; enough to go on as if it had never stopped."""

    step: int = 0
    epoch: int = 0
    position: int = 0
    """Rows of the epoch that are done."""
    rows: int = 0
    """Over all steps."""
    trained_tokens: int = 0


@dataclass(frozen=True)
class Staged:
    """A checkpoint taken out of the learner: what training goes on to change is copied, the rest is written later."""

    folder: Path
    cursor: Cursor
    final: bool
    manifest: dict[str, Any]
    stop: list[int]
    """Token ids that end a turn."""
    state: dict[str, torch.Tensor]
    generators: dict[str, torch.Tensor]
    latest: dict[str, Any]
    """Of the manifest: the metrics and the evaluation that a resumed run still has to know."""


@dataclass(frozen=True)
class Bundle:
    """The index of a resume bundle."""

    cursor: Cursor
    latest: dict[str, Any]
    compute: dict[str, Any]
    """As in the manifest."""
    files: list[dict[str, Any]]

    @property
    def dtype(self) -> torch.dtype:
        dtype: torch.dtype = getattr(torch, self.compute["dtype"])
        return dtype


def stage(
    work: Work,
    learner: Learner,
    cursor: Cursor,
    *,
    final: bool,
    facts: dict[str, Any],
    latest: dict[str, Any],
    stop: list[int],
) -> Staged:
    """In the loop, so it is short. `facts` and `latest` go into the manifest."""
    folder = work.folder / f"step-{cursor.step:08d}"
    customer = folder / "checkpoint"
    customer.mkdir(parents=True)
    learner.save_adapter(customer, base_model=work.assignment.model_name)
    modules = adapted_modules(customer)
    if not modules:
        raise RuntimeError("the adapter that was saved has no module: nothing would be applied")
    manifest = {
        "version": 1,
        "job": work.assignment.job_id,
        "model": work.assignment.model_name,
        "step": cursor.step,
        "final": final,
        "adapted_modules": modules,
        "spec": work.spec.model_dump(mode="json"),
        "code_version": work.code_version,
        "versions": {"torch": torch.__version__, "python": platform.python_version()},
        **facts,
        **latest,
    }
    return Staged(folder, cursor, final, manifest, stop, learner.state(), _generators(), dict(latest))


def compute_of(work: Work, learner: Learner, base_sha256: str) -> dict[str, Any]:
    """On what the numbers depend besides data, seed and hyper-parameters."""
    return {
        "base_sha256": base_sha256,
        "dtype": str(learner.dtype).removeprefix("torch."),
        "device": work.device,
        "threads": torch.get_num_threads(),
    }


def publish(work: Work, staged: Staged) -> None:
    """Write, hash, upload, then the fenced row; frees the disk."""
    step = f"step-{staged.cursor.step:08d}/"
    prefix, resume_prefix = (f"{work.assignment.output_prefix}{kind}/{step}" for kind in ("checkpoints", "resume"))
    customer = staged.folder / "checkpoint"
    _copy_of_base(work.model_folder, customer, staged.stop)
    (customer / "README.md").write_text(_model_card(work, staged.manifest), encoding="utf-8")
    files = storage.upload_all(work.store, customer, prefix)
    manifest_json = json.dumps({**staged.manifest, "files": [asdict(file) for file in files]}, indent=1)
    files.append(storage.upload_text(work.store, manifest_json, prefix, MANIFEST))
    work.control.publish(
        step=staged.cursor.step,
        final=staged.final,
        prefix=prefix,
        files=[asdict(file) for file in files],
        manifest_json=manifest_json,
        resume_prefix=resume_prefix,
        resume_sha256=_upload_resume(work, staged, resume_prefix),
    )
    shutil.rmtree(staged.folder)


def _upload_resume(work: Work, staged: Staged, prefix: str) -> str:
    """The sha256 of the bundle's index."""
    folder = staged.folder / "resume"
    folder.mkdir()
    save_file(staged.state, folder / "learner.safetensors")
    save_file(staged.generators, folder / "generators.safetensors")
    files = [asdict(file) for file in storage.upload_all(work.store, folder, prefix)]
    index = {
        "version": 1,
        "cursor": asdict(staged.cursor),
        "latest": staged.latest,
        "compute": staged.manifest["compute"],
        "files": files,
    }
    return storage.upload_text(work.store, json.dumps(index), prefix, _INDEX).sha256


def resume_bundle(work: Work, base_sha256: str) -> Bundle | None:
    """Where the assignment goes on from. Raises DigestError, WorkerError `model_changed`."""
    if not work.assignment.HasField("resume"):
        return None
    raw = storage.read(work.store, work.assignment.resume.prefix + _INDEX)
    if hashlib.sha256(raw).hexdigest() != work.assignment.resume.sha256:
        raise DigestError("the index of the resume bundle is not the one that was published")
    index = json.loads(raw)
    if (expected := index["compute"]["base_sha256"]) != base_sha256:
        message = f"base weights: expected {expected}, on which the run began, found {base_sha256}"
        raise WorkerError("model_changed", message)
    return Bundle(Cursor(**index["cursor"]), index["latest"], index["compute"], index["files"])


def resume(work: Work, bundle: Bundle, learner: Learner) -> None:
    """Puts learner and generators where the bundle was written. Raises DigestError."""
    prefix, folder = work.assignment.resume.prefix, work.folder / "resume"
    storage.download_all(work.store, prefix, [(f["path"], f["sha256"]) for f in bundle.files], folder)
    learner.load_state(load_file(folder / "learner.safetensors"))
    _set_generators(load_file(folder / "generators.safetensors"))
    shutil.rmtree(folder)


def start_from(work: Work, learner: Learner) -> None:
    """Loads the adapter of the checkpoint that the job starts from; the optimizer stays fresh."""
    prefix = work.assignment.start_prefix
    manifest = json.loads(storage.read(work.store, prefix + MANIFEST))
    files = [(f["path"], f["sha256"]) for f in manifest["files"] if f["path"].startswith("adapter_")]
    folder = work.folder / "start"
    storage.download_all(work.store, prefix, files, folder)
    learner.load_adapter(folder)
    shutil.rmtree(folder)


def adapted_modules(folder: Path) -> int:
    """Modules with an adapter in an exported checkpoint."""
    with safe_open(folder / ADAPTER, framework="pt") as file:
        return sum(1 for name in file.keys() if ".lora_A." in name)  # noqa: SIM118


def _copy_of_base(base: Path, folder: Path, stop: list[int]) -> None:
    for name in _TOKENIZER_FILES:
        if (base / name).exists():
            shutil.copyfile(base / name, folder / name)
    (folder / "chat_template.jinja").write_bytes(template_source(base).encode())
    generation = _generation(base)
    ends = generation.get("eos_token_id")
    known = ends if isinstance(ends, list) else [] if ends is None else [ends]
    generation["eos_token_id"] = sorted({*known, *stop})
    (folder / "generation_config.json").write_text(json.dumps(generation, indent=1))


def _generation(base: Path) -> dict[str, Any]:
    """The base's settings; where it has none, what transformers would take from its config."""
    settings = base / "generation_config.json"
    if settings.exists():
        found: dict[str, Any] = json.loads(settings.read_text())
        return found
    config = json.loads((base / "config.json").read_text())
    return {key: config[key] for key in ("bos_token_id", "eos_token_id", "pad_token_id") if key in config}


def _generators() -> dict[str, torch.Tensor]:
    states = {"cpu": torch.get_rng_state()}
    return states | {f"cuda.{n}": state for n, state in enumerate(_cuda_states())}


def _cuda_states() -> list[torch.Tensor]:
    return torch.cuda.get_rng_state_all() if torch.cuda.is_available() else []


def _set_generators(states: dict[str, torch.Tensor]) -> None:
    torch.set_rng_state(states["cpu"])
    for n in range(min(len(states) - 1, torch.cuda.device_count())):
        torch.cuda.set_rng_state(states[f"cuda.{n}"], n)


def _model_card(work: Work, manifest: dict[str, Any]) -> str:
    name, spec = work.assignment.model_name, work.spec
    return f"""---
base_model: {name}
library_name: peft
tags: [lora, {spec.method}]
---

# {json.dumps(spec.name or work.assignment.job_id, ensure_ascii=False)[1:-1]}

A LoRA adapter (rank {spec.adapter.rank}, alpha {spec.adapter.alpha:g}) for `{name}`, trained by Finery with
`{spec.method}`: step {manifest["step"]} of {manifest["total_steps"]}. `{MANIFEST}` says how.

```python
from peft import PeftModel
from transformers import AutoModelForCausalLM, AutoTokenizer

model = PeftModel.from_pretrained(AutoModelForCausalLM.from_pretrained("<folder of the base model>"), "<this folder>")
tokenizer = AutoTokenizer.from_pretrained("<this folder>")
```
"""
