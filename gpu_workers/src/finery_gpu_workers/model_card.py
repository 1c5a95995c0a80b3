"""README.md of a checkpoint: what it is, and the lines that load it."""

from __future__ import annotations

import json
from typing import Any

from finery.types.methods import LoraAdapter
from finery_gpu_workers.manifest import MANIFEST, MERGED
from finery_gpu_workers.work import Work

_HERE = '"<this folder>"'


def model_card(work: Work, manifest: dict[str, Any], *, merged: bool) -> str:
    """`merged`: the whole merged model lies in the checkpoint too."""
    name, spec = work.assignment.model_name, work.spec
    full = manifest["kind"] == "full"
    tags = json.dumps(["full-fine-tuning" if full else "lora", spec.method])
    lines = _whole(_HERE) if full else _adapter(manifest)
    also = ""
    if merged:
        also = _section("Or as one model, merged exactly as it was trained:", _whole(f'"<this folder>/{MERGED}"'))
    return f"""---
base_model: {name}
library_name: {"transformers" if full else "peft"}
tags: {tags}
---

# {json.dumps(spec.name or work.assignment.job_id, ensure_ascii=False)[1:-1]}

{_what(work)}, trained by Finery with `{spec.method}`: step {manifest["step"]} of {manifest["total_steps"]}, computed in
{manifest["compute"]["dtype"]}. {_objective(manifest)}`{MANIFEST}` says how.
{_section("To load it:", lines)}{also}"""


def _objective(manifest: dict[str, Any]) -> str:
    """Of methods that have one in the manifest."""
    if "loss" not in manifest:
        return ""
    loss, reference = manifest["loss"], manifest["reference"]
    against = f"; reference: `{reference}`" if reference else "; no reference"
    return f"Loss: `{loss['name']}` with beta {loss['beta']:g}{against}. "


def _what(work: Work) -> str:
    adapter = work.spec.adapter
    if not isinstance(adapter, LoraAdapter):
        return f"All weights of `{work.assignment.model_name}`"
    whole = f" with whole {' and '.join(dict.fromkeys(adapter.modules_to_save))}" if adapter.modules_to_save else ""
    return f"A LoRA adapter (rank {adapter.rank}, alpha {adapter.alpha:g}){whole} for `{work.assignment.model_name}`"


def _section(title: str, lines: list[str]) -> str:
    code = "\n".join(lines)
    return f"\n{title}\n\n```python\n{code}\n```\n"


def _whole(folder: str) -> list[str]:
    return [
        "from transformers import AutoModelForCausalLM, AutoTokenizer",
        "",
        f"model = AutoModelForCausalLM.from_pretrained({folder})",
        f"tokenizer = AutoTokenizer.from_pretrained({folder})",
    ]


def _adapter(manifest: dict[str, Any]) -> list[str]:
    """The base, part by part, in the dtype that was trained in; then the adapter."""
    chain = manifest["base"]["chain"]
    whole = max((n for n, part in enumerate(chain) if part["kind"] == "full"), default=-1)
    base = "<folder of the base model>" if whole < 0 else f"<folder of {chain[whole]['checkpoint']}>"
    lines = [
        "from peft import PeftModel",
        "from transformers import AutoModelForCausalLM, AutoTokenizer, GenerationConfig",
        "",
        f'model = AutoModelForCausalLM.from_pretrained("{base}", dtype="{manifest["compute"]["dtype"]}")',
    ]
    for part in chain[whole + 1 :]:
        lines += _resized(part)
        folder = f'"<folder of {part["checkpoint"]}>"'
        lines.append(f"model = PeftModel.from_pretrained(model, {folder}).merge_and_unload()")
    return [
        *lines,
        *_resized(manifest),
        f"model = PeftModel.from_pretrained(model, {_HERE})",
        # PEFT keeps the base's, which may not know the token that ends a turn.
        f"model.generation_config = GenerationConfig.from_pretrained({_HERE})",
        f"tokenizer = AutoTokenizer.from_pretrained({_HERE})",
    ]


def _resized(content: dict[str, Any]) -> list[str]:
    """Tokens were added: without it, loading fails because the matrices differ in size."""
    base, rows = content.get("base_vocab_size"), content.get("vocab_size")
    if base == rows:
        return []
    return [f"model.resize_token_embeddings({rows}, mean_resizing=False)  # from {base}: tokens were added"]
