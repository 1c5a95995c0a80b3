"""What the configuration files of a model folder say about its tokens."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from tokenizers import Tokenizer


def special_tokens(folder: Path) -> dict[str, str]:
    """`bos_token` and the like, as templates expect them."""
    settings = read_json(folder / "special_tokens_map.json") | read_json(folder / "tokenizer_config.json")
    found = {key: value for key, value in settings.items() if key.endswith("_token")}
    texts = {key: value["content"] if isinstance(value, dict) else value for key, value in found.items()}
    return {key: value for key, value in texts.items() if isinstance(value, str)}


def end_tokens(folder: Path, tokenizer: Tokenizer) -> list[int]:
    """Ids at which the model stops: the tokenizer's `eos_token` first, then those of its generation settings."""
    text = special_tokens(folder).get("eos_token")
    named = [tokenizer.token_to_id(text)] if text is not None else []
    settings = (read_json(folder / f"{name}.json").get("eos_token_id") for name in ("generation_config", "config"))
    listed = [id_ for ids in settings for id_ in (ids if isinstance(ids, list) else [ids])]
    return list(dict.fromkeys(id_ for id_ in [*named, *listed] if isinstance(id_, int)))


def read_json(file: Path) -> dict[str, Any]:
    """Empty where there is no such file."""
    content: dict[str, Any] = json.loads(file.read_text("utf-8")) if file.exists() else {}
    return content
