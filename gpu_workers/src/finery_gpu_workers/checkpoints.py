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
from finery_gpu_workers.data.prepared import sha256_file
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
    """A checkpoint on the worker's disk."""

    folder: Path
    step: int
    final: bool
    manifest: dict[str, Any]


def stage(
    work: Work, learner: Learner, cursor: Cursor, *, final: bool, facts: dict[str, Any], stop: list[int]
) -> Staged:
    """Writes both folders. `facts` go into the manifest; `stop` are token ids that end a turn."""
    folder = work.folder / f"step-{cursor.step:08d}"
    customer, resume = folder / "checkpoint", folder / "resume"
    customer.mkdir(parents=True)
    resume.mkdir()
    learner.save_adapter(customer, base_model=work.assignment.model_name)
    if not adapted_modules(customer):
        raise RuntimeError("the adapter that was saved has no module: nothing would be applied")
    _copy_of_base(work.model_folder, customer, stop)
    manifest = {
        "version": 1,
        "job": work.assignment.job_id,
        "model": work.assignment.model_name,
        "step": cursor.step,
        "final": final,
        "adapted_modules": adapted_modules(customer),
        "spec": work.spec.model_dump(mode="json"),
        "code_version": work.code_version,
        "versions": {"torch": torch.__version__, "python": platform.python_version()},
        **facts,
    }
    (customer / "README.md").write_text(_model_card(work, manifest))
    save_file(learner.state(), resume / "learner.safetensors")
    save_file(_generators(), resume / "generators.safetensors")
    files = [_entry(resume / name) for name in ("learner.safetensors", "generators.safetensors")]
    (resume / _INDEX).write_text(json.dumps({"version": 1, "cursor": asdict(cursor), "files": files}))
    return Staged(folder, cursor.step, final, manifest)


def publish(work: Work, staged: Staged) -> None:
    """Hash, upload, then the fenced row; frees the disk."""
    customer, resume = staged.folder / "checkpoint", staged.folder / "resume"
    prefix = work.assignment.output_prefix
    step = f"step-{staged.step:08d}/"
    files = [_entry(path) for path in sorted(customer.iterdir())]
    manifest_json = json.dumps({**staged.manifest, "files": files}, indent=1)
    (customer / MANIFEST).write_text(manifest_json)
    stored = storage.upload_all(work.store, customer, f"{prefix}checkpoints/{step}")
    storage.upload_all(work.store, resume, f"{prefix}resume/{step}")
    work.control.publish(
        step=staged.step,
        final=staged.final,
        prefix=f"{prefix}checkpoints/{step}",
        files=[asdict(file) for file in stored],
        manifest_json=manifest_json,
        resume_prefix=f"{prefix}resume/{step}",
        resume_sha256=sha256_file(resume / _INDEX),
    )
    shutil.rmtree(staged.folder)


def resume(work: Work, learner: Learner) -> Cursor:
    """Puts learner and generators where the assignment's resume bundle was written. Raises DigestError."""
    bundle = work.assignment.resume
    raw = storage.read(work.store, bundle.prefix + _INDEX)
    if hashlib.sha256(raw).hexdigest() != bundle.sha256:
        raise DigestError("the index of the resume bundle is not the one that was published")
    index = json.loads(raw)
    folder = work.folder / "resume"
    storage.download_all(work.store, bundle.prefix, [(f["path"], f["sha256"]) for f in index["files"]], folder)
    learner.load_state(load_file(folder / "learner.safetensors"))
    _set_generators(load_file(folder / "generators.safetensors"))
    shutil.rmtree(folder)
    return Cursor(**index["cursor"])


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


def _entry(path: Path) -> dict[str, Any]:
    return {"path": path.name, "bytes": path.stat().st_size, "sha256": sha256_file(path)}


def _copy_of_base(base: Path, folder: Path, stop: list[int]) -> None:
    for name in _TOKENIZER_FILES:
        if (base / name).exists():
            shutil.copyfile(base / name, folder / name)
    (folder / "chat_template.jinja").write_bytes(template_source(base).encode())
    settings = base / "generation_config.json"
    generation = json.loads(settings.read_text()) if settings.exists() else {}
    ends = generation.get("eos_token_id", [])
    generation["eos_token_id"] = sorted({*(ends if isinstance(ends, list) else [ends]), *stop})
    (folder / settings.name).write_text(json.dumps(generation, indent=1))


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

# {json.dumps(spec.name or work.assignment.job_id)[1:-1]}

A LoRA adapter (rank {spec.adapter.rank}, alpha {spec.adapter.alpha:g}) for `{name}`, trained by Finery with
`{spec.method}`: step {manifest["step"]} of {manifest["total_steps"]}. `{MANIFEST}` says how.

```python
from peft import PeftModel
from transformers import AutoModelForCausalLM, AutoTokenizer

model = PeftModel.from_pretrained(AutoModelForCausalLM.from_pretrained("<folder of the base model>"), "<this folder>")
tokenizer = AutoTokenizer.from_pretrained("<this folder>")
```
"""
