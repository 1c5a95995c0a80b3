"""The prompts of grpo_step."""

from __future__ import annotations

import json
from pathlib import Path

from grpo_task import PROMPTS_PER_STEP, WORDS, prompt
from sft_rows import model
from tokenizers import Tokenizer


def write(path: Path, steps: int) -> None:
    """The prompts of `steps` steps, as texts and as ids."""
    tokenizer = Tokenizer.from_file(str(model() / "tokenizer.json"))
    words = [WORDS[n % len(WORDS)] for n in range(steps * PROMPTS_PER_STEP)]
    rows = [{"word": word, "prompt": prompt(word)} for word in words]
    ids = [tokenizer.encode(row["prompt"], add_special_tokens=False).ids for row in rows]
    path.write_text(json.dumps([{**row, "prompt_ids": one} for row, one in zip(rows, ids, strict=True)]))
