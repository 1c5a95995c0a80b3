"""The prompts of generate_tokens: the first questions of `chitchat-dataset`, in ChatML."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any

from sft_rows import model
from tokenizers import Tokenizer

sys.path.insert(0, str(Path(__file__).resolve().parent.parent / "examples"))
from data import fetch, turns

SYSTEM = "You are a helpful AI assistant named SmolLM, trained by Hugging Face"


def prompts(count: int) -> list[list[int]]:
    tokenizer = Tokenizer.from_file(str(model() / "tokenizer.json"))
    conversations: dict[str, Any] = fetch()
    asked = [turns(conversations[name])[0] for name in sorted(conversations)[:count]]
    heads = [
        f"<|im_start|>system\n{SYSTEM}<|im_end|>\n<|im_start|>user\n{text}<|im_end|>\n<|im_start|>assistant\n"
        for text in asked
    ]
    return [tokenizer.encode(text, add_special_tokens=False).ids for text in heads]
