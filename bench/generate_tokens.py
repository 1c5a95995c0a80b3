"""Tokens per second of sampling, against transformers: SmolLM2-135M, bf16, 32 rows, temperature 1, no filters.

    make bench ONLY=generate_tokens ARGS="--pairs 5 --threads 1"

A call answers 4 prompts 8 times each with exactly 64 tokens (end tokens are ignored on both sides), as a step of
grpo_step does, whose prompts these are: ours through the rollout engine; transformers through `generate` with
`num_return_sequences`, prompts padded on the left, its cache on. Every run is a fresh process, the sides in turn, and
makes three such calls after one of a few tokens that is not timed; loading is in none. `--prompts 32` samples from 32
prompts once each instead: then every prompt has to be read for one answer on both sides.

The peer's own log-probs of what it drew in its first call are held against ours, uncached and in float32 and bf16: the
means must agree to 1 %, so that both sample from one distribution. Ours must score what it drew alike, too.

The rows that it gives: generate_tokens (CPU-seconds) and generate_memory (peak resident set, ours over theirs).
"""

from __future__ import annotations

import argparse
import json
import os
import tempfile
from functools import partial
from pathlib import Path
from typing import Any

import grpo_rows
import sft_rows
import sides
from grpo_task import PROMPTS_PER_STEP
from rows import Bound, Row

BOUNDS = {"generate_tokens": Bound(at_least=2.4), "generate_memory": Bound(at_most=1.25)}
PEER = "generate"
ROWS, NEW_TOKENS, CALLS = 32, 64, 3
TOLERANCE = 0.01


def run(options: list[str]) -> list[Row]:
    parser = argparse.ArgumentParser(prog="generate_tokens")
    parser.add_argument("--pairs", type=int, default=3, help="runs of every side")
    parser.add_argument("--threads", type=int, default=len(os.sched_getaffinity(0)))
    parser.add_argument("--prompts", type=int, default=4, choices=[n for n in range(1, ROWS + 1) if ROWS % n == 0])
    chosen = parser.parse_args(options)
    with tempfile.TemporaryDirectory(prefix="finery-bench-") as folder:
        path = Path(folder) / "prompts.json"
        grpo_rows.write(path, CALLS * chosen.prompts // PROMPTS_PER_STEP + 1)
        rows = json.loads(path.read_text())[: CALLS * chosen.prompts]
        path.write_text(json.dumps([row["prompt_ids"] for row in rows]))
        job = {
            "model": str(sft_rows.model()),
            "prompts": str(path),
            "threads": chosen.threads,
            "per_call": chosen.prompts,
            "samples": ROWS // chosen.prompts,
            "new_tokens": NEW_TOKENS,
        }
        runs = sides.in_turn({name: partial(_side, job, name) for name in ("ours", PEER)}, chosen.pairs, "tokens")
        for side in runs.values():
            _compare(job, side[0])
    note = f"SmolLM2-135M, {chosen.prompts} prompts × {job['samples']} answers × {NEW_TOKENS} tokens, "
    note += f"{chosen.threads} thread(s)"

    def row(name: str, kind: str, unit: str) -> Row:
        def measure(one: dict[str, Any]) -> float:
            return float(one[kind] if kind == "peak" else one["tokens"] / one[kind])

        return sides.row(name, runs, PEER, measure, unit=unit, note=note, bound=BOUNDS[name], peer="transformers 5.24")

    return [
        row("generate_tokens", "cpu", "tokens per CPU-second"),
        row("generate_memory", "peak", "bytes of peak resident set"),
    ]


def _side(job: dict[str, Any], name: str) -> dict[str, Any]:
    if name == "ours":
        return sides.ours("generate_ours.py", job)
    return sides.trl("generate_transformers.py", job, {"config": {}})


def _compare(job: dict[str, Any], one: dict[str, Any]) -> None:
    """Raises RuntimeError where it drew other numbers of tokens, or from another distribution than our model's."""
    drawn, mean = one["first"], one["mean_log_prob"]
    if one["tokens"] != CALLS * ROWS * NEW_TOKENS or {len(answer["tokens"]) for answer in drawn} != {NEW_TOKENS}:
        raise RuntimeError(f"expected {CALLS} × {ROWS} answers of {NEW_TOKENS} tokens, found {one['tokens']} tokens")
    found = sides.ours("generate_ours.py", {"model": job["model"], "threads": job["threads"], "drawn": drawn})
    print(f"mean log-prob of what was drawn in the first call: it says {mean:.4f}, ours scores {found}")
    for dtype, scored in found.items():
        if abs(scored / mean - 1) > TOLERANCE:
            raise RuntimeError(f"expected a mean log-prob of {mean}, found {scored} in {dtype}")
