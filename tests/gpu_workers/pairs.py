"""Pairs as tests look at them."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from tokenizers import processors

from finery_gpu_workers.data.preference import Pair, Pairs
from finery_testing.tiny import BOS, byte_tokenizer, make_tiny_model

from .in_process import Render


def pairs_of(rendered: Render, rows: list[Any], **options: Any) -> list[Pair]:
    pairs = Pairs(rendered("dpo", rows, **options).data.train)
    return [pairs.pair(n) for n in range(len(pairs))]


def ids(pair: Pair) -> tuple[list[int], list[int], list[int]]:
    return pair.prompt.tolist(), pair.chosen.tolist(), pair.rejected.tolist()


def masks(pair: Pair) -> tuple[list[int], list[int]]:
    return pair.chosen_mask.tolist(), pair.rejected_mask.tolist()


def texts(prompt: int, chosen: int, rejected: int) -> dict[str, Any]:
    """A row of so many tokens; the last of each answer is the end token."""
    return {"prompt": "pqrstuvw"[:prompt], "chosen": "abcdefghi"[: chosen - 1], "rejected": "xyzXYZijk"[: rejected - 1]}


def with_bos(folder: Path) -> Path:
    """F-TOK that puts BOS before every text."""
    make_tiny_model(folder)
    tokenizer = byte_tokenizer()
    tokenizer.post_processor = processors.TemplateProcessing(single="<|bos|> $A", special_tokens=[("<|bos|>", BOS)])
    tokenizer.save(str(folder / "tokenizer.json"))
    return folder
