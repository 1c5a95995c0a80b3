"""Seconds of a GRPO step, against TRL: SmolLM2-135M, LoRA r 16 on all linear layers, bf16, AdamW, no KL.

    make bench ONLY=grpo_step ARGS="--pairs 5 --threads 1"

A step samples 8 answers to each of 4 prompts, rewards them, trains them all and updates. End tokens are ignored on both
sides, so that both sample and train exactly 64 tokens of each answer. TRL as a user would call GRPOTrainer, all at its
defaults but for what names the task, and tuned (`TUNED`: base and adapter in bf16, no activation checkpointing, the
step's 32 answers in one batch). Ours runs as a worker does by default; and, for the rows about memory, once more with
small micro-batches, as TRL's defaults recompute activations for the sake of memory. Every run is a fresh process, the
sides in turn. On the token ids and advantages of TRL's first step our gradient must have the norm that TRL reports, to
5 % (bf16 rounds differently there and here).
"""

from __future__ import annotations

import argparse
import os
import tempfile
from functools import partial
from pathlib import Path
from typing import Any

import grpo_rows
import sft_rows
import sides
from rows import Bound, Row

BOUNDS = {
    "grpo_step": Bound(at_least=4.0),
    "grpo_step_tuned": Bound(at_least=3.0),
    "grpo_memory": Bound(at_most=0.5),
    "grpo_memory_tuned": Bound(at_most=0.5),
}
TUNED = "all bf16, one batch"
CANDIDATES: dict[str, dict[str, Any]] = {
    "defaults": {"config": {}},
    TUNED: {
        "config": {
            "model_init_kwargs": {"dtype": "bfloat16"},
            "gradient_checkpointing": False,
            "bf16": False,
            "per_device_train_batch_size": 32,
            "gradient_accumulation_steps": 1,
        },
        "environment": sides.KEEP_MEMORY,
        "adapter_in_bf16": True,
    },
}
LEAN = "ours, lean"
MICRO_BATCH_TOKENS = {"ours": 2048, LEAN: 320}
TOLERANCE = 0.05


def run(options: list[str]) -> list[Row]:
    parser = argparse.ArgumentParser(prog="grpo_step")
    parser.add_argument("--pairs", type=int, default=3, help="runs of every side")
    parser.add_argument("--threads", type=int, default=len(os.sched_getaffinity(0)))
    parser.add_argument("--steps", type=int, default=2, help="of a run")
    chosen = parser.parse_args(options)
    with tempfile.TemporaryDirectory(prefix="finery-bench-") as folder:
        path = Path(folder) / "prompts.json"
        grpo_rows.write(path, chosen.steps)
        job = {"model": str(sft_rows.model()), "rows": str(path), "threads": chosen.threads}
        names = ("ours", LEAN, *CANDIDATES)
        runs = sides.in_turn({name: partial(_side, job, name) for name in names}, chosen.pairs, "steps")
        for name in CANDIDATES:
            _compare(job, name, runs[name][0], runs["ours"][0])
    note = f"SmolLM2-135M, 4 prompts × 8 answers × 64 tokens, {chosen.threads} thread(s)"

    def row(name: str, other: str, kind: str, unit: str) -> Row:
        def measure(one: dict[str, Any]) -> float:
            return float(one[kind] if kind == "peak" else one["steps"] / one[kind])

        mine, where = (LEAN, f"{note}, micro_batch_tokens 320") if kind == "peak" else ("ours", note)
        compared = {"ours": runs[mine], other: runs[other]}
        return sides.row(name, compared, other, measure, unit=unit, note=where, bound=BOUNDS[name])

    return [
        row("grpo_step", "defaults", "cpu", "steps per CPU-second"),
        row("grpo_step_tuned", TUNED, "cpu", "steps per CPU-second"),
        row("grpo_memory", "defaults", "peak", "bytes of peak resident set"),
        row("grpo_memory_tuned", TUNED, "peak", "bytes of peak resident set"),
    ]


def _side(job: dict[str, Any], name: str) -> dict[str, Any]:
    if name in MICRO_BATCH_TOKENS:
        return sides.ours("grpo_ours.py", {**job, "micro_batch_tokens": MICRO_BATCH_TOKENS[name]})
    return sides.trl("grpo_trl.py", job, CANDIDATES[name])


def _compare(job: dict[str, Any], name: str, trl: dict[str, Any], ours: dict[str, Any]) -> None:
    """Raises RuntimeError where the work, or the gradient on the same rollouts, is not the same."""
    answers = {len(answer) for answer in trl["first"]["answers"]}
    each = ours["generated"] / ours["steps"] / len(trl["first"]["answers"])
    if answers != {each} or trl["trainable"] != ours["trainable"]:
        raise RuntimeError(f"{name}: expected answers of {each} tokens, found {answers}")
    found = sides.ours("grpo_ours.py", {"model": job["model"], "threads": job["threads"], "first": trl["first"]})
    print(f"norm of the gradient of the first step of {name}: TRL {trl['grad_norms'][0]:.4f}, ours {found}")
    for dtype, norm in found.items():
        if abs(norm / trl["grad_norms"][0] - 1) > TOLERANCE:
            raise RuntimeError(f"{name}: expected a gradient of norm {trl['grad_norms'][0]}, found {norm} in {dtype}")
