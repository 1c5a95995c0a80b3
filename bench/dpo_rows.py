"""What both sides of dpo_pairs train: prompts of real conversations, the true next turn and one of elsewhere."""

from __future__ import annotations

import itertools
import json
import sys
from pathlib import Path
from typing import Any

from sft_rows import model
from tokenizers import Tokenizer

sys.path.insert(0, str(Path(__file__).resolve().parent.parent / "examples"))
import data

PROMPT_TURNS = 5

Pair = dict[str, Any]


def pairs(folder: Path, count: int) -> list[Pair]:
    """`prompt`, `chosen`, `rejected` as texts, and their ids, which TRL must find too."""
    tokenizer = Tokenizer.from_file(str(folder / "tokenizer.json"))
    conversations, found = data.fetch(), []
    for name in sorted(conversations):
        windows = list(data.rows(conversations[name]))
        if windows:
            found.append([message["content"] for message in windows[0]["messages"]])
        if len(found) == count + 1:
            break
    made = []
    for said, other in itertools.pairwise(found):
        texts = {"prompt": _prompt(said), "chosen": said[PROMPT_TURNS], "rejected": other[PROMPT_TURNS]}
        ends = {"prompt": "", "chosen": "<|im_end|>", "rejected": "<|im_end|>"}
        encoded = {
            f"{key}_ids": tokenizer.encode(text + ends[key], add_special_tokens=False).ids
            for key, text in texts.items()
        }
        made.append({**texts, **encoded})
    if len(made) < count:
        raise ValueError(f"expected {count} pairs, found {len(made)}")
    return made


def write(path: Path, count: int) -> list[Pair]:
    made = pairs(model(), count)
    path.write_text(json.dumps(made))
    return made


def _prompt(said: list[str]) -> str:
    roles = ("user", "assistant")
    turns = "".join(f"<|im_start|>{roles[n % 2]}\n{text}<|im_end|>\n" for n, text in enumerate(said[:PROMPT_TURNS]))
    return f"{turns}<|im_start|>assistant\n"
