"""The manifest of a checkpoint: the reproducibility bundle, in one JSON object.

What made it (spec, data, base, code, versions, seed), on what the numbers depend (`compute`), what is in it, and how it
can be served.
"""

from __future__ import annotations

import json
import platform
from importlib.metadata import version
from pathlib import Path
from typing import Any

import torch
from safetensors import safe_open

from finery.types.methods import LoraAdapter
from finery_gpu_workers.companions import template_digest
from finery_gpu_workers.data.tokens import tokenizer_sha256
from finery_gpu_workers.learner import Learner
from finery_gpu_workers.models.interface import Model
from finery_gpu_workers.models.peft_layout import servable
from finery_gpu_workers.start import Start
from finery_gpu_workers.work import Work

MANIFEST = "manifest.json"
MERGED = "merged"
_VERSION = 2
_PACKAGES = ("torch", "transformers", "tokenizers", "safetensors", "numpy")


def compute_of(work: Work, model: Model, base_sha256: str) -> dict[str, Any]:
    """On what the numbers depend besides data, seed and hyper-parameters."""
    return {
        "base_sha256": base_sha256,
        "dtype": str(model.dtype).removeprefix("torch."),
        "device": work.device,
        "threads": torch.get_num_threads(),
        "engine": model.engine,
    }


def manifest_of(
    work: Work, start: Start, index: dict[str, Any], model: Model, learner: Learner, compute: dict[str, Any]
) -> dict[str, Any]:
    """What all checkpoints of an attempt have in common. `index` is that of the prepared data."""
    trained = learner.trained
    return {
        "version": _VERSION,
        "job": work.assignment.job_id,
        "model": work.assignment.model_name,
        "kind": learner.kind,
        "base": _base(work, start),
        "spec": work.spec.model_dump(mode="json"),
        "seed": work.spec.seed,
        "data": index["report"],
        "data_digests": {name: entry["digest"] for name, entry in index["sets"].items()},
        "template_sha256": template_digest(start.tokenizer),
        "tokenizer_sha256": tokenizer_sha256(start.tokenizer),
        "code_version": work.code_version,
        "versions": {"python": platform.python_version()} | {name: version(name) for name in _PACKAGES},
        "compute": compute,
        "engine_reason": model.engine_reason or None,
        "trained_parameters": trained.parameters,
        "trained_modules": len(trained.modules),
        "base_vocab_size": start.vocabulary.base,
        "vocab_size": model.vocab,
        "tied": model.tied,
        "merge_dtype": compute["dtype"],
        **_serving(work, start),
    }


def parameters_in(folder: Path) -> int:
    """Numbers stored in the safetensors files of a folder, by their headers."""
    total = 0
    for path in sorted(folder.glob("*.safetensors")):
        with safe_open(path, framework="pt") as file:
            for name in file.keys():  # noqa: SIM118
                total += torch.Size(file.get_slice(name).get_shape()).numel()
    return total


def modules_in(folder: Path) -> set[str]:
    """The modules that have a low-rank pair or a whole matrix in an exported adapter, named as in transformers."""
    with safe_open(folder / "adapter_model.safetensors", framework="pt") as file:
        names = [name.removeprefix("base_model.model.").removesuffix(".weight") for name in file.keys()]  # noqa: SIM118
    return {name.removesuffix(".lora_A").removesuffix(".lora_B") for name in names}


def _base(work: Work, start: Start) -> dict[str, Any]:
    """The catalogue's model, then the checkpoints on it. A folder or bucket of the operator's is not named."""
    source = json.loads(work.assignment.model_source_json)
    public = source if source["type"] in ("hub", "wheel") else {"type": source["type"]}
    return {"model": work.assignment.model_name, "source": public, "chain": start.chain, "sha256": start.sha256}


def _serving(work: Work, start: Start) -> dict[str, Any]:
    adapter = work.spec.adapter
    if not isinstance(adapter, LoraAdapter):
        return {"servable_as_adapter": False, "reason": "the checkpoint is a whole model: serve it as one"}
    facts = servable(adapter, own_base=bool(start.chain))
    if not facts["servable_as_adapter"]:
        how = f"`{MERGED}/` of the final checkpoint" if work.spec.export_merged else "`export_merged: true`"
        facts["merged_export"] = how
    return facts
