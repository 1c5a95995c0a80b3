"""What a stored model or adapter needs beside its weights: tokenizer, chat template, generation settings."""

from __future__ import annotations

import hashlib
import json
import shutil
from pathlib import Path
from typing import Any

from finery_gpu_workers.data.chat import template_source
from finery_gpu_workers.start import TOKENIZER_FILES

_TEMPLATE = "chat_template.jinja"
_CONFIG = "tokenizer_config.json"


def write_companions(source: Path, folder: Path, stop: list[int]) -> None:
    """From the job's tokenizer folder. Generation ends at the `stop` ids too: those that end a trained turn.

    Files are copied byte for byte. The template is written to both places that readers look at; a model without one
    gets none.
    """
    for name in TOKENIZER_FILES:
        if (source / name).exists():
            shutil.copyfile(source / name, folder / name)
    if (template := template_of(source)) is not None:
        (folder / _TEMPLATE).write_bytes(template.encode())
        if template_in_config(folder) != template:
            content = _read(folder / _CONFIG) | {"chat_template": template}
            (folder / _CONFIG).write_text(json.dumps(content, ensure_ascii=False, indent=2), encoding="utf-8")
    generation = _generation(source)
    ends = generation.get("eos_token_id")
    known = ends if isinstance(ends, list) else [] if ends is None else [ends]
    if known or stop:
        generation["eos_token_id"] = sorted({*known, *stop})
    (folder / "generation_config.json").write_text(json.dumps(generation, indent=1))


def template_of(folder: Path) -> str | None:
    """The text of the chat template; None for a model without one."""
    has_one = (folder / _TEMPLATE).exists() or "chat_template" in _read(folder / _CONFIG)
    return template_source(folder) if has_one else None


def template_in_config(folder: Path) -> str | None:
    """The one in `tokenizer_config.json`, which some servers read alone."""
    found = _read(folder / _CONFIG).get("chat_template")
    if isinstance(found, list):  # several, by name
        found = next((entry["template"] for entry in found if entry.get("name") == "default"), None)
    return found if isinstance(found, str) else None


def template_digest(folder: Path) -> str | None:
    template = template_of(folder)
    return None if template is None else hashlib.sha256(template.encode()).hexdigest()


def _generation(source: Path) -> dict[str, Any]:
    """The base's settings; where it has none, what transformers would take from its config."""
    if (source / "generation_config.json").exists():
        return _read(source / "generation_config.json")
    config = _read(source / "config.json")
    return {key: config[key] for key in ("bos_token_id", "eos_token_id", "pad_token_id") if key in config}


def _read(file: Path) -> dict[str, Any]:
    content: dict[str, Any] = json.loads(file.read_text("utf-8")) if file.exists() else {}
    return content
